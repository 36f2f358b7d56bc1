"""Choose the gradient compressor: the requested one or, with auto, one measured to be faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from drivetrain.config.schema import Communication
from drivetrain.parallel.accelerator import accelerator_of
from drivetrain.parallel.clock import Moment, clock_of
from drivetrain.strategies.ddp.compression import Compressor, Mean, Plain, compressor_for, install

# When a trial ends. These are pure functions: ranks with the same figures decide alike.
#
# A round is one step with plain gradients and one with the candidate. On a slow link each plain
# step is expensive, so the first round is enough if it confirms the measured exchange times: one
# disturbance is unlikely to distort two measurements of different kinds in the same way. Otherwise
# rounds continue until every step of one kind is well below every step of the other, and after the
# last round the medians decide.

MOST_ROUNDS = 5
WORTH_KEEPING = 0.95
"""Fraction of a whole step. Step times vary, and in doubt gradients stay plain."""
_CLEARLY = 0.75
_BORNE_OUT = (0.5, 1.5)
"""Range for saved over predicted time. Below: backward hides it. Above: something else was slow."""


def pays(plain: Sequence[float], candidate: Sequence[float], promised_s: float) -> bool | None:
    """Whether the candidate's steps are faster; None if another round is needed."""
    plain_s, candidate_s = median(plain), median(candidate)
    if len(plain) == 1:
        least, most = (share * promised_s for share in _BORNE_OUT)
        is_borne_out = least <= plain_s - candidate_s <= most
        return True if is_borne_out and candidate_s < _CLEARLY * plain_s else None
    if max(candidate) < _CLEARLY * min(plain):
        return True
    if max(plain) < _CLEARLY * min(candidate):
        return False
    if len(plain) < MOST_ROUNDS:
        return None
    return candidate_s < WORTH_KEEPING * plain_s


# auto: plain gradients, unless a compressor is measurably faster on this run's own steps.
#
# There are two measurements, the cheap one first. Before the run, a sample is sent in each way; if
# no candidate's exchange is much faster, torch's plain ddp is used. Otherwise the best candidate is
# tried: steps alternate between plain gradients and the candidate until `pays` decides, and from
# then on the faster way is used. Only whole steps can decide this: an exchange that is hidden
# behind backward costs nothing, however long it takes.

_SAMPLE_BYTES = 4 * 2**20
_TRIES, _MORE_TRIES = 2, 3
"""At least two: the first may be slow because the connection's TCP window is still growing."""
_PLAINLY_S = 0.1
"""An exchange this long means a slow link; more tries would only cost the same again."""
_WORTH_A_TRIAL = 0.8
"""For the exchange alone; overlapped with backward, less is gained."""
_AS_FAST = 1.05
"""Candidates this close are considered equal, and the first one in `allow` is tried."""
_LEAST_S = 1e-3
"""Possible savings per step below this are ignored, because the hook itself costs some of it."""
_UNCOUNTED_STEPS = 2


@dataclass(frozen=True)
class OnTheWire:
    """Seconds to exchange all gradients once, estimated from a sample."""

    seconds: dict[str, float]

    def best(self) -> str:
        """Return the candidate for a trial, or "none" if plain gradients are fast enough."""
        plain = self.seconds["none"]
        others = {name: s for name, s in self.seconds.items() if name != "none"}
        fastest = min(others.values(), default=plain)
        if fastest > _WORTH_A_TRIAL * plain or plain - fastest < _LEAST_S:
            return "none"
        return next(name for name, s in others.items() if s <= _AS_FAST * fastest)

    def saved_s(self, name: str) -> float:
        """Return the predicted saving of a candidate per step."""
        return self.seconds["none"] - self.seconds[name]

    def __str__(self) -> str:
        words = {"none": "plain"}
        return ", ".join(f"{words.get(n, n)} {s * 1e3:.1f} ms" for n, s in self.seconds.items())


class _Sample:
    """A stand-in for a `GradBucket` with one square matrix."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self._matrix = matrix

    def buffer(self) -> torch.Tensor:
        return self._matrix.view(-1)

    def gradients(self) -> list[torch.Tensor]:
        return [self._matrix]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def measure_wire(
    config: Communication, gradient_bytes: int, group: dist.ProcessGroup, device: torch.device
) -> OnTheWire:
    """Time a sample exchange in each way. A collective call; every rank gets the same figures."""
    side = max(1, int((min(gradient_bytes, _SAMPLE_BYTES) / 4) ** 0.5))
    scale = gradient_bytes / (4 * side * side)
    seconds = {}
    for name in ("none", *config.allow):
        compressor = begins_at_once(name, config, group)
        for _ in range(2):  # warm-up: opens connections, and PowerSGD's first steps are plain
            _time(compressor, 1, group, device)
        seconds[name] = _shortest(compressor, side, group, device) * scale
    return OnTheWire(seconds)


def begins_at_once(name: str, config: Communication, group: dist.ProcessGroup) -> Compressor:
    """Return a compressor for measurements: PowerSGD starts after two plain steps.

    With the configured `start_step`, a trial might see plain steps only.
    """
    powersgd = config.powersgd.model_copy(update={"start_step": 2})
    return compressor_for(name, config.model_copy(update={"powersgd": powersgd}), group)


def _shortest(
    compressor: Compressor, side: int, group: dist.ProcessGroup, device: torch.device
) -> float:
    """Return the shortest of a few tries, and of some more if they are fast; slowest rank's."""

    def best_of(tries: int) -> float:
        taken_s = min(_time(compressor, side, group, device) for _ in range(tries))
        return _slowest([taken_s], group, device)[0]

    shortest = best_of(_TRIES)
    return shortest if shortest > _PLAINLY_S else min(shortest, best_of(_MORE_TRIES))


def _slowest(seconds: list[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Return the slowest rank's times on all ranks, so that all ranks decide alike."""
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    agreed: list[float] = slowest.tolist()
    return agreed


def _time(
    compressor: Compressor, side: int, group: dist.ProcessGroup, device: torch.device
) -> float:
    bucket: Any = _Sample(torch.randn(side, side, device=device, generator=_generator(device)))
    dist.barrier(group)
    accelerator_of(device).synchronize()
    began = time.perf_counter()
    compressor.exchange(bucket).wait()
    accelerator_of(device).synchronize()
    return time.perf_counter() - began


def _generator(device: torch.device) -> torch.Generator:
    """Return a separate generator, so that the run's random streams are not changed."""
    return torch.Generator(device).manual_seed(0)


class Trial:
    """Alternate between plain gradients and a candidate, then use the one with shorter steps."""

    name = "auto"

    def __init__(
        self, plain: Plain, candidate: Compressor, promised_s: float, device: torch.device
    ) -> None:
        self.when_settled: Callable[[str, str], None] | None = None
        """Called with the choice and its reason."""
        self._plain, self._candidate = plain, candidate
        self._promised_s, self._device = promised_s, device
        self._now: Compressor = candidate
        self._is_settled = False
        self._clock = clock_of(accelerator_of(device))
        self._began: Moment = None
        self._num_steps = 0
        self._taken_s: list[float] = []
        """This rank's steps of the current round."""
        self._plain_s: list[float] = []
        self._candidate_s: list[float] = []

    @property
    def choice(self) -> str:
        """The name of the chosen way; empty until the trial ends."""
        return self._now.name if self._is_settled else ""

    def exchange(self, bucket: GradBucket) -> Mean:
        """Exchange a bucket in this step's way. A step's first bucket always has index 0."""
        if not self._is_settled and bucket.index() == 0:
            self._turn()
        return self._now.exchange(bucket)

    def _turn(self) -> None:
        """End a step, which is timed from first bucket to first bucket, and choose the next way.

        The first steps are a warm-up with the candidate: on a slow link plain ones are expensive.
        """
        if self._num_steps > _UNCOUNTED_STEPS:
            now = self._clock.now()
            self._clock.wait_for(now)  # waits for the device, but only in the few steps of a trial
            self._taken_s.append(self._clock.seconds(self._began, now))
        if len(self._taken_s) == 2:
            self._end_round()
        if self._is_settled:
            return
        counted = self._num_steps - _UNCOUNTED_STEPS
        self._now = self._plain if counted >= 0 and counted % 2 == 0 else self._candidate
        self._num_steps += 1
        self._began = self._clock.now()

    def _end_round(self) -> None:
        """Decide from the figures that all ranks have."""
        plain_s, candidate_s = _slowest(self._taken_s, self._plain.group, self._device)
        self._taken_s = []
        self._plain_s.append(plain_s)
        self._candidate_s.append(candidate_s)
        does_pay = pays(self._plain_s, self._candidate_s, self._promised_s)
        if does_pay is not None:
            self._settle(does_pay)

    def _settle(self, does_pay: bool) -> None:
        self._now = self._candidate if does_pay else self._plain
        self._is_settled = True
        if self.when_settled is None:
            return
        plain_s, candidate_s = median(self._plain_s), median(self._candidate_s)
        name, rounds = self._candidate.name, len(self._plain_s)
        self.when_settled(
            self._now.name,
            f"a step took {plain_s * 1e3:.1f} ms with plain gradients and "
            f"{candidate_s * 1e3:.1f} ms with {name}, "
            + ("one of each" if rounds == 1 else f"medians of {rounds}")
            + ("" if does_pay else f"; {name} would be chosen below {WORTH_KEEPING:.0%}"),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the candidate and the choice, if made: it holds for the rest of the run."""
        return {
            "candidate": self._candidate.name,
            "choice": self.choice,
            "state": self._candidate.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the choice, unless the candidate has changed."""
        if state["candidate"] != self._candidate.name:
            return  # the link was a different one, so its measurements do not apply here
        self._candidate.load_state_dict(state["state"])
        if state["choice"]:
            is_plain = state["choice"] == self._plain.name
            self._now = self._plain if is_plain else self._candidate
            self._is_settled = True


# Install what `communication` asks for on a DDP-wrapped model.


@dataclass(frozen=True)
class Installed:
    """What was installed, and why if the choice was automatic."""

    compressor: Compressor | None = None
    """None: torch's own all-reduce without a hook."""
    why_none: str = ""
    """Why auto chose no compressor."""
    note: str = ""


def install_compression(
    config: Communication, wrapped: DistributedDataParallel, device: torch.device
) -> Installed:
    """Register a communication hook if the config asks for one. A collective call with auto."""
    if config.compression == "none":
        return Installed()
    group = wrapped.process_group
    if config.compression != "auto":
        compressor = compressor_for(config.compression, config, group)
        install(compressor, wrapped)
        return Installed(compressor)
    size = sum(p.numel() * p.element_size() for p in wrapped.parameters() if p.requires_grad)
    wire = measure_wire(config, size, group, device)
    best = wire.best()
    if best == "none":
        return Installed(why_none=f"exchanging the gradients would take: {wire}")
    candidate = begins_at_once(best, config, group)
    trial = Trial(Plain(group), candidate, wire.saved_s(best), device)
    install(trial, wrapped)
    return Installed(trial, note=f"communication: trying {best}; time per exchange: {wire}")
