"""What `Trainer.fit` does in a rehearsal: the same assembly and the same loop, for two steps.

Whatever needs real values or other processes is left out: saving, evaluating, writing records. Data
is read as usual, according to this rank's share of the plan.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import _disable_current_modes

from drivetrain.config.provenance import ResolvedConfig
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.plugins import load
from drivetrain.core.traits import all_traits
from drivetrain.data.batches import BatchPlan
from drivetrain.data.feed import Feed, Turn
from drivetrain.data.sources import source_from
from drivetrain.parallel.gather import equal_rows
from drivetrain.parallel.parts import local_parts
from drivetrain.plan.profile.fake_tensor_patches import moving_modules, torchs_own
from drivetrain.rehearse.calls import Line, here
from drivetrain.rehearse.fake_tensor_dispatch import FakeTensorDispatch
from drivetrain.rehearse.findings import RankMemory
from drivetrain.rehearse.world import RehearsedWorld
from drivetrain.train.assemble import Assembly, assemble
from drivetrain.train.history import History, StepMetrics
from drivetrain.train.hooks import HookCaller
from drivetrain.train.loop import Loop
from drivetrain.train.saving.run_state import Position
from drivetrain.train.task import Loss, Task, split
from drivetrain.train.trainer import Trainer, kind_of_loop
from drivetrain.train.watch.logged_steps import LoggedSteps
from drivetrain.train.watch.meter import Meter

NUM_STEPS = 2
"""The first step creates the optimizer's state, the second is like all that follow."""


@dataclass
class Seen:
    """Observations during a rehearsal, kept outside so that an error cannot lose them."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    last_step: slice = field(default_factory=lambda: slice(0, 0))
    """The last step's range in the list of calls."""
    missing: tuple[tuple[str, Line | None], ...] = ()
    notes: tuple[str, ...] = ()
    batches: BatchPlan | None = None

    def memory(self, tensors: FakeTensorDispatch) -> RankMemory:
        """Return the memory so far."""
        live = tensors.memory
        return RankMemory(
            self.weights, self.gradients, self.optimizer, live.peak, live.peak_line, live.over
        )


def rehearse_fit(
    trainer: Trainer, train: Any, world: RehearsedWorld, tensors: FakeTensorDispatch, seen: Seen
) -> None:
    """Run two steps of the user's training as one rank of `world`."""
    resolved = _settled(trainer.resolved)
    lines: dict[str, Line | None] = {}
    task = replace(
        trainer.task,
        model=lambda: _build(trainer.task, tensors, lines),
        loss=lambda model, batch: _lose(trainer.task, model, batch, tensors),
    )
    following = tensors.memory.following_resizes()
    within = resolved.config.parallel.traits.rehearse_within
    of_strategy = load(within)() if within else nullcontext()
    with tensors, following, moving_modules(), of_strategy, torchs_own():
        assembly = assemble(task, resolved, source_from(train, resolved.config.data), world)
        trainer.assembly, trainer.resolved = assembly, assembly.resolved
        spread = assembly.engine.spread
        assembly.engine.meter = _Unread(world, counts=spread.counts)
        assembly.engine.sentinel = None  # values are not computed, so copies cannot be compared
        spread.expects_all = False  # _Watch finds missing gradients and their lines
        gc.collect()  # frees the whole model, of which this rank keeps a part
        seen.weights, seen.batches = _weight_bytes(assembly.engine.model), assembly.feed.plan
        idle = f"warning: {seen.batches.idle_warning}"  # which is a finding of the rehearsal
        seen.notes = tuple(note for note in assembly.notes if note != idle)
        tensors.memory.watch(world.device_memory_bytes)
        watch = _Watch(trainer, tensors, seen, lines)
        watch("on_setup")  # later hooks may need what it creates, which also takes memory
        loop = _loop(task, assembly, tensors, watch)
        trainer.model.train()
        loop.run(NUM_STEPS, None)


def _settled(resolved: ResolvedConfig) -> ResolvedConfig:
    """Refuse what cannot be rehearsed, and switch off compilation."""
    config = resolved.config
    problems = []
    if not config.parallel.traits.can_be_rehearsed:
        able = " and ".join(each.name for each in all_traits() if each.can_be_rehearsed)
        rule = f"only {able}, with tp, pp, cp and ep, can be rehearsed"
        problems.append(
            Problem("parallel.strategy", rule, "use one of them", config.parallel.strategy)
        )
    if config.communication.compression != "none":
        rule = "compressed gradients cannot be rehearsed"
        key = "communication.compression"
        problems.append(Problem(key, rule, "rehearse with none", config.communication.compression))
    if problems:
        raise ConfigError(problems)
    if config.compile.enabled:
        resolved = resolved.choose(
            "compile.enabled", False, "a rehearsal runs operator by operator"
        )
    return resolved


def _build(task: Task, tensors: FakeTensorDispatch, lines: dict[str, Line | None]) -> nn.Module:
    made_at: dict[tuple[int, str], Line | None] = {}

    def note(module: nn.Module, name: str, _: Any) -> None:
        made_at[id(module), name] = here()

    hook = register_module_parameter_registration_hook(note)
    tensors.builds = True
    try:
        model = task.model()
    finally:
        tensors.builds = False
        hook.remove()
    tensors.replace_weights(model)
    for prefix, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            lines[full] = made_at.get((id(module), name))
    return model


def _lose(task: Task, model: nn.Module, batch: Any, tensors: FakeTensorDispatch) -> Loss:
    tensors.memory.doing = "computing the loss"
    with equal_rows():  # no other rank exists to report its number of rows
        loss, _ = split(task.loss(model, batch))
    tensors.memory.doing = "running backward"
    return loss


def _loop(task: Task, assembly: Assembly, tensors: FakeTensorDispatch, notify: _Watch) -> Loop:
    config = assembly.config
    return kind_of_loop(config)(
        task=task,
        engine=assembly.engine,
        feed=_FakedFeed(assembly.feed, tensors),
        recorder=_Nothing(),  # type: ignore[arg-type]  # records are not rehearsed
        notify=notify,
        logging_steps=config.record.logging_steps,
        evaluate_every=None,
        evaluate=None,
        report=_ignore,
        logged=LoggedSteps.of(assembly, History(), _say_nothing),
        saver=_SavesNothing(),  # type: ignore[arg-type]  # nor is saving
        at=Position(),
    )


def _ignore(metrics: list[StepMetrics]) -> None:
    """Ignore the metrics, whose values do not exist."""


def _say_nothing(text: str) -> None:
    """Drop log lines, which a rehearsal does not show."""


class _Nothing:
    """Accepts every call and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class _SavesNothing:
    """A saver that never saves."""

    ends = False

    def after_step(self, step: int, before: Callable[[], None]) -> None:
        """Save nothing after a step."""

    def finish(self) -> None:
        """Save nothing at the end."""


class _FakedFeed:
    """Reads real data without the rehearsal's modes, and passes on stand-ins."""

    def __init__(self, feed: Feed, tensors: FakeTensorDispatch) -> None:
        self.plan = feed.plan
        self._feed = feed
        self._tensors = tensors

    def steps(self, total_steps: int | None, num_epochs: int | None) -> Iterator[Iterator[Turn]]:
        steps = self._feed.steps(total_steps, num_epochs)
        while True:
            with _disable_current_modes():  # a stream is read here, not with each turn
                turns = next(steps, None)
            if turns is None:
                return
            yield self._turns(turns)

    def _turns(self, turns: Iterator[Turn]) -> Iterator[Turn]:
        while True:
            with _disable_current_modes():
                turn = next(turns, None)
            if turn is None:
                return
            yield turn[0], self._tensors.stand_in(turn[1])

    def state_dict(self) -> dict[str, Any]:
        return self._feed.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._feed.load_state_dict(state)

    def sample_ids(self, step: int) -> list[int]:
        return self._feed.sample_ids(step)


class _Unread(Meter):
    """Exchanges losses as usual, but discards them, since their values do not exist."""

    def collect(self) -> list[StepMetrics]:
        steps, self._closed = self._closed, []
        if steps:
            self._world.sum_floats([0.0] * len(steps))
        return []


class _Watch:
    """Calls the user's hooks and inspects the gradients."""

    def __init__(
        self,
        trainer: Trainer,
        tensors: FakeTensorDispatch,
        seen: Seen,
        lines: dict[str, Line | None],
    ) -> None:
        self._hooks = HookCaller(trainer, trainer.hooks)
        self._trainer = trainer
        self._tensors = tensors
        self._seen = seen
        self._lines = lines

    def __call__(self, name: str, *arguments: Any) -> None:
        if name == "on_before_optimizer_step":
            self._look_at_gradients()
            self._tensors.memory.doing = "stepping the optimizer"
        elif name == "on_train_batch_start" and arguments[0] == NUM_STEPS:
            self._seen.last_step = slice(len(self._tensors.calls), None)
        self._hooks(name, *arguments)
        if name == "on_train_batch_end":
            self._seen.optimizer = _state_bytes(self._trainer)
            if arguments[0] == NUM_STEPS:
                begin = self._seen.last_step.start
                self._seen.last_step = slice(begin, len(self._tensors.calls))

    def _look_at_gradients(self) -> None:
        wanted = [
            (name, p) for name, p in self._trainer.model.named_parameters() if p.requires_grad
        ]
        self._seen.missing = tuple(
            (name, self._lines.get(name)) for name, p in wanted if p.grad is None
        )
        gradients = [p.grad for _, p in wanted if p.grad is not None]
        self._seen.gradients = sum(g.numel() * g.element_size() for g in local_parts(gradients))


def _weight_bytes(model: nn.Module) -> int:
    kept = local_parts([*model.parameters(), *model.buffers()])
    return sum(tensor.numel() * tensor.element_size() for tensor in kept)


def _state_bytes(trainer: Trainer) -> int:
    if trainer.assembly is None:
        return 0
    states = trainer.assembly.engine.optimizer.state.values()
    tensors = [v for state in states for v in state.values() if isinstance(v, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in local_parts(tensors))
