"""Replay: every so many steps, compute a micro-batch twice and compare the results bit for bit.

A processor that miscalculates occasionally raises no error. The bits of each weight's gradient on a
rank, before it is reduced, are summed in a rehearsal without side effects and in the real pass. If
the sums differ, a third pass distinguishes a single wrong result from a model whose results differ
each time. Ranks exchange one number per check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum

import torch
import torch.distributed as dist

from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import ConfigError, Problem, SilentCorruption
from drivetrain.parallel.model import ParallelModel
from drivetrain.parallel.world import World
from drivetrain.train.watch.sentinel import bit_sum

Sums = dict[str, torch.Tensor]
"""Bit sums of a pass's gradients, by the parameter's name."""
Pass = Callable[[bool], None]
"""Runs forward and backward of one micro-batch; the argument is True for the real pass."""

KEY = "sentinel.replay_every_steps"


class Outcome(IntEnum):
    """Result of comparing a rank's passes."""

    SAME = 0
    ONE_DIFFERS = 1
    ALL_DIFFER = 2


class Replay:
    """Replays micro-batches of one model under a `Trainer`."""

    def __init__(
        self, spread: ParallelModel, world: World, every_steps: int, say: Callable[[str], None]
    ) -> None:
        self._spread = spread
        self._world = world
        self._every_steps = every_steps
        self._say = say
        self._first_step: int | None = None
        self._is_over = False
        self._passes: list[Sums] = []
        self._again: Callable[[], None] | None = None

    @classmethod
    def of(
        cls, config: RunConfig, spread: ParallelModel, world: World, say: Callable[[str], None]
    ) -> Replay | None:
        """Return None if the config does not ask for replays."""
        every = config.sentinel.replay_every_steps
        if every is None:
            return None
        if not spread.can_replay:
            kind = config.parallel.strategy
            rule = f"{kind} as configured here counts every backward pass as a real one"
            raise ConfigError(
                [Problem(KEY, rule, "leave it out, or use a different strategy", every)]
            )
        return cls(spread, world, every, say)

    def is_due(self, step: int) -> bool:
        """True if this step, counted from 1, is checked; the second step of an attempt always is.

        It shows whether the model gives the same bits twice at all. (In the first step FSDP has not
        gathered its weights yet.)
        """
        if self._first_step is None:
            self._first_step = step
        is_second = step == self._first_step + 1
        return not self._is_over and (is_second or step % self._every_steps == 0)

    def compute(self, once: Pass) -> None:
        """Run a rehearsal, then the real pass."""
        buffers = {name: buffer.clone() for name, buffer in self._spread.inner.named_buffers()}

        def rehearse() -> None:
            """Run a pass that leaves gradients and buffers unchanged."""
            parameters = [p for p in self._spread.inner.parameters() if p.requires_grad]
            gradients = [parameter.grad for parameter in parameters]
            now = {name: buffer.clone() for name, buffer in self._spread.inner.named_buffers()}
            self._forget(parameters)
            _put_back(self._spread.inner, buffers)
            self._passes.append(self._summed(once, is_real=False))
            _put_back(self._spread.inner, now)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

        self._again = rehearse
        rehearse()
        self._passes.append(self._summed(once, is_real=True))

    def _summed(self, once: Pass, *, is_real: bool) -> Sums:
        sums: Sums = {}
        with _watching(self._spread.gradient_leaves(), sums):
            once(is_real)
        return sums

    def settle(self, step: int) -> None:
        """Compare the passes, after the last micro-batch of a checked step. A collective call.

        A rank without samples in this step has nothing to compare.
        """
        differ = bool(self._passes) and _differ(self._passes[0], self._passes[1])
        flag = torch.tensor([int(differ)], device=self._world.device)
        if self._world.mesh is not None:
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        if flag.item():
            self._judge(step)
        self._passes, self._again = [], None

    def _judge(self, step: int) -> None:
        if self._again is not None:
            self._again()
        outcome, name = _outcome(self._passes)
        outcomes = self._outcomes(outcome)
        assert self._first_step is not None  # noqa: S101 - is_due came first
        if is_the_models_way(outcomes, is_first=step == self._first_step + 1):
            self._is_over = True
            self._say(
                f"replay: at step {step} the same samples gave different bits the second time on "
                f"{_listed([r for r, o in enumerate(outcomes) if o])}: this model's kernels are "
                f"not deterministic, so {KEY} is of no use and is switched off; "
                "torch.use_deterministic_algorithms(True) or reproducibility=bitwise may help"
            )
            return
        odd = [rank for rank, found in enumerate(outcomes) if found]
        named = f" (first in the gradient of {name})" if name else ""
        raise SilentCorruption(
            f"replay: at step {step} {_listed(odd)} did not compute the same bits twice from the "
            f"same samples and weights{named}; the weights were not updated by it. If it happens "
            f"again, remove the device or the host of {_listed(odd)}; steps since the last check, "
            f"{self._last_check(step)}, were not checked"
        )

    def _last_check(self, step: int) -> str:
        assert self._first_step is not None  # noqa: S101 - is_due came first
        before = (step - 1) // self._every_steps * self._every_steps
        return f"after step {max(before, self._first_step + 1)}"

    def _outcomes(self, own: Outcome) -> list[Outcome]:
        if self._world.mesh is None:
            return [own]
        mine = torch.tensor([int(own)], device=self._world.device)
        gathered = [torch.empty_like(mine) for _ in range(self._world.identity.world_size)]
        dist.all_gather(gathered, mine)
        return [Outcome(int(each.item())) for each in gathered]

    @staticmethod
    def _forget(parameters: Sequence[torch.Tensor]) -> None:
        for parameter in parameters:
            parameter.grad = None


def is_the_models_way(outcomes: Sequence[Outcome], *, is_first: bool) -> bool:
    """True if results differ because the model's own operations are not deterministic. Pure.

    Two processors do not fail in the same step, and one that was wrong once is right the next time.
    """
    odd = [outcome for outcome in outcomes if outcome is not Outcome.SAME]
    if len(outcomes) == 1:
        return is_first or odd == [Outcome.ALL_DIFFER]
    return len(odd) > 1


def _outcome(passes: Sequence[Sums]) -> tuple[Outcome, str]:
    """Compare a rehearsal, the real pass and another rehearsal; name where they first differ."""
    if not passes or not _differ(passes[0], passes[1]):
        return Outcome.SAME, ""
    first, real, again = passes
    name = next(name for name in real if not torch.equal(first[name], real[name]))
    all_differ = _differ(first, again) and _differ(real, again)
    return (Outcome.ALL_DIFFER if all_differ else Outcome.ONE_DIFFERS), name


def _differ(one: Sums, other: Sums) -> bool:
    if one.keys() != other.keys():
        return True
    return bool(one) and not torch.equal(
        torch.stack(list(one.values())), torch.stack([other[name] for name in one])
    )


@contextmanager
def _watching(leaves: Mapping[str, torch.Tensor], sums: Sums) -> Iterator[None]:
    """Context that sums the bits of the gradients that backward computes for `leaves`."""

    def note(name: str) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            found = bit_sum(gradient.detach())
            sums[name] = sums[name] + found if name in sums else found

        return hook

    handles = [leaf.register_hook(note(name)) for name, leaf in leaves.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _put_back(model: torch.nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
