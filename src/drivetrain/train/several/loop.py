"""A user's own loop with several models: GANs, a critic and an actor.

loop = drivetrain.prepare({"G": G, "D": D}, {"G": opt_g, "D": opt_d}, train_set, config)
for step in loop.steps():                    # one global batch
    for _ in range(5):
        for (real,) in step:                 # a pass over this rank's micro-batches
            loop.backward(critic_loss(real), "D")
        loop.step("D")
    for (real,) in step:
        loop.backward(-D(G(noise(real))).mean(), "G")
    loop.step("G")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.stateful import Stateful
from drivetrain.data.batches import MicroBatch
from drivetrain.data.feed import Turn
from drivetrain.parallel.several_models import ModelsByName
from drivetrain.train.assemble import Assembly
from drivetrain.train.keep_loop import NOT_CALLED, KeptLoop
from drivetrain.train.loop import Loop
from drivetrain.train.optimization.given import GivenOptimizer
from drivetrain.train.optimization.own_schedule import (
    LRSchedule,
    ScheduleFactory,
    SchedulesByName,
    as_factory,
)
from drivetrain.train.refusals import check_loss, check_model, checked
from drivetrain.train.setup.model import Prebuilt
from drivetrain.train.several.engine import SeveralEngines
from drivetrain.train.several.optimizers import OptimizersByName
from drivetrain.train.task import Loss, LossAndParts, Task, split
from drivetrain.train.watch.leftovers import Gradients

Models = Mapping[str, nn.Module | Callable[[], nn.Module]]
Schedulers = Mapping[str, LRScheduler | LRSchedule | ScheduleFactory]


def task_of_several(models: Models, optimizers: Any, schedulers: Any, loss: Any) -> Task:
    """Build a task from the dicts passed to `prepare`; ConfigError if the names differ."""
    _check_names("model", models, None)
    are_made = {isinstance(model, nn.Module) for model in models.values()}
    if len(are_made) > 1:
        raise TypeError("pass either models or functions that build them, not both")
    if are_made == {True}:
        task = Task(model=Prebuilt(_made(models)), loss=loss)
    else:
        task = Task(model=lambda: _made(models), loss=loss)
    if optimizers is not None:
        _check_names("optimizer", optimizers, models)
        if not isinstance(task.model, Prebuilt):
            raise TypeError("an optimizer needs the model it was built on, not a function")
        task = replace(task, optimizer=_GivenForEach(optimizers, task.model.model))
    if schedulers is not None:
        if not isinstance(schedulers, Mapping) or not set(schedulers) <= set(models):
            _check_names("scheduler", schedulers, models)
        made = {name: as_factory(schedulers[name]) for name in schedulers}
        task = replace(task, schedule=SchedulesByName(made))
    return task


def _made(models: Models) -> ModelsByName:
    made = {n: m if isinstance(m, nn.Module) else checked(m)() for n, m in models.items()}
    found = ModelsByName(made)
    owners: dict[int, str] = {}
    for name, model in found.items():
        check_model(model, 1)
        for parameter in model.parameters():
            if owners.setdefault(id(parameter), name) != name:
                rule = f"shares weights with {owners[id(parameter)]}, but each needs one owner"
                raise ConfigError([Problem("model", rule, "give each weight to one model", name)])
    return found


def _check_names(what: str, given: Any, models: Models | None) -> None:
    """ConfigError unless the names are the models', and there is at least one."""
    if not isinstance(given, Mapping):
        rule, remedy = "is not a dict, as the models are", f"use {{{', '.join(models or ())}}}"
        raise ConfigError([Problem(what, rule, remedy, type(given).__name__)])
    if not given:
        raise ConfigError([Problem(what, "is an empty dict", "name one", has_value=False)])
    if models is None or set(given) == set(models):
        return
    rule = f"has the names {', '.join(map(str, given))}, but the models are {', '.join(models)}"
    raise ConfigError([Problem(what, rule, "use the models' names", has_value=False)])


class _GivenForEach:
    """Optimizers that the user built, updated to each distributed model's parameters."""

    def __init__(
        self, optimizers: Mapping[str, torch.optim.Optimizer], models: ModelsByName | nn.Module
    ) -> None:
        for name, optimizer in optimizers.items():
            if not isinstance(optimizer, torch.optim.Optimizer):
                rule, remedy = "is not a torch optimizer", "give one for each model"
                raise ConfigError(
                    [Problem(f"optimizer[{name!r}]", rule, remedy, type(optimizer).__name__)]
                )
        parts = dict(models.named_children())
        self._given = {
            name: GivenOptimizer(optimizers[name], model) for name, model in parts.items()
        }

    def __call__(self, model: ModelsByName) -> OptimizersByName:
        return OptimizersByName({name: given(model[name]) for name, given in self._given.items()})


class SeveralLoop(KeptLoop):
    """`KeptLoop` for several models, each of which iterates over a step's micro-batches."""

    def __init__(self, assembly: Assembly, stateful: Mapping[str, Stateful]) -> None:
        super().__init__(assembly, stateful)
        if not isinstance(assembly.engine, SeveralEngines):
            raise TypeError("several models need an engine each")
        self._engines = assembly.engine
        self._number = 0
        """Current step, counted from 0."""
        self._seen: list[str] = []
        """Models whose backward was called for the current micro-batch."""
        self._ready: set[str] = set()
        """Models whose gradients are complete and need step()."""
        self._is_saved = False
        self._gradients_of = {
            name: Gradients(engine.optimizer, engine.spread)
            for name, engine in self._engines.by_name.items()
        }

    def _models(self) -> Iterable[nn.Module]:
        return self._engine.spread.inner.children()

    def _micro_batches(self, loop: Loop, turns: Iterator[Turn]) -> Iterable[Any]:
        self._number, self._is_saved = self._at.step, False
        return _Passes(self, loop.micro_batches(turns))

    @property
    def _current(self) -> int:
        """Number of the step under way, also after one of its models has made its own."""
        return self._number + 1

    def _check_whole(self) -> None:
        if self._ready:
            name = sorted(self._ready)[0]
            raise RuntimeError(
                f'backward(loss, "{name}") was called, but step("{name}") was not: gradients are '
                "not kept from one step to the next"
            )

    def take(self, micro: MicroBatch, batch: Any, *, is_last: bool, turn: int) -> Iterator[Any]:
        """Yield one micro-batch of a pass."""
        self._micro, self._seen = micro, []
        engine = self._engines
        with engine.micro_batch(micro, is_last=is_last, stage=turn), engine.autocast:
            yield batch
        self._micro = None
        if not self._seen:
            raise RuntimeError(f"loop.backward(loss, name) {NOT_CALLED}")

    @property
    def seen(self) -> set[str]:
        """Models whose backward was called for the current micro-batch."""
        return set(self._seen)

    def end_pass(self, names: set[str]) -> None:
        """Mark the models that can step, after all micro-batches were used."""
        self._ready |= names
        self._seed_script(self._number)

    def backward(self, loss: Loss | LossAndParts, name: str | None = None) -> None:
        """Add the micro-batch's gradients to those of the model called `name`."""
        name = self._known("backward", name)
        if self._micro is None:
            raise RuntimeError("call backward() inside `for batch in step`")
        if name in self._seen:
            raise RuntimeError(
                f'backward(loss, "{name}") was called twice for one micro-batch: sum the losses'
            )
        if name in self._ready:
            raise RuntimeError(f'call step("{name}") before the next backward(loss, "{name}")')
        self._refuse_after_save()
        check_loss(loss)
        if not self._engines.by_name[name].spread.inner.training:
            self._say_eval(f"the model {name}")
        if self._looks_at_losses:
            self._check(split(loss)[0])
        gradients = self._gradients_of[name]
        gradients.before_backward()
        with torch.autocast(self._engine.world.device.type, enabled=False):
            self._engines.backward_of(name, loss, self._micro)
        gradients.after_backward()
        self._seen.append(name)

    def step(self, name: str | None = None) -> None:
        """Clip, set the learning rate and update the weights of the model called `name`."""
        name = self._known("step", name)
        if self._loop is None or self._micro is not None or name not in self._ready:
            raise RuntimeError(
                f'call step("{name}") after a complete `for batch in step` with '
                f'backward(loss, "{name}") in it'
            )
        self._refuse_after_save()
        self._gradients_of[name].before_step()
        self._loop.timer.optimizing()
        with self._updates.runs_turn():
            self._engines.step_of(name, self._number)
        self._gradients_of[name].forget()
        self._loop.timer.ended()
        self._ready.discard(name)
        self._at.step = self._number + 1
        self._is_after_step = not self._ready

    def save(self) -> None:
        """Save a checkpoint of the step. Call on every rank, after its last `step()`."""
        super().save()
        self._is_saved = True

    def _refuse_after_save(self) -> None:
        if self._is_saved:
            raise RuntimeError("call save() after the last step() of an iteration of the loop")

    def _known(self, what: str, name: str | None) -> str:
        names = list(self._engines.by_name)
        if name is None or name not in names:
            rule = "is not one of the models" if name is not None else "there are several models"
            remedy = f"use {' or '.join(repr(each) for each in names)}"
            raise ConfigError([Problem(what, rule, remedy, repr(name))])
        return name


class _Passes:
    """A step's micro-batches, which can be iterated over repeatedly."""

    def __init__(
        self, loop: SeveralLoop, micro_batches: Iterator[tuple[MicroBatch, Any, bool]]
    ) -> None:
        self._loop = loop
        self._source: Iterator[tuple[MicroBatch, Any, bool]] | None = micro_batches
        self._kept: list[tuple[MicroBatch, Any, bool]] = []
        self._num_begun = 0

    def __iter__(self) -> Iterator[Any]:
        turn, self._num_begun = self._num_begun, self._num_begun + 1
        if turn and self._source is not None:
            raise RuntimeError("a pass over the step's batches was not completed")
        names: set[str] | None = None
        for micro, batch, is_last in self._source if self._source is not None else self._kept:
            if self._source is not None:
                self._kept.append((micro, batch, is_last))
            yield from self._loop.take(micro, batch, is_last=is_last, turn=turn)
            if names is not None and self._loop.seen != names:
                raise RuntimeError(
                    "backward() was called for other models than in the pass's first micro-batch"
                )
            names = self._loop.seen
        self._source = None
        self._loop.end_pass(names or set())
