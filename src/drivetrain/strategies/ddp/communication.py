"""Which compressor a run uses: the one asked for or, with auto, one that has shown that it pays."""

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

# When a trial has seen enough. Pure: ranks that have the same figures decide alike.
#
# A round is one step with plain gradients and one with the candidate. On a slow link each plain
# step is dear, so the first round is enough when it bears out what the wire has promised: two
# measurements of different kinds that a hiccup would have to strike alike. Otherwise rounds go on
# until every step of the one way is well below every step of the other, and after the last round
# medians decide.

MOST_ROUNDS = 5
WORTH_KEEPING = 0.95
"""Of a whole step; steps differ by themselves, and in doubt gradients stay plain."""
_CLEARLY = 0.75
_BORNE_OUT = (0.5, 1.5)
"""So much of the promised time is saved. Less: backward hides it. More: something else was slow."""


def pays(plain: Sequence[float], candidate: Sequence[float], promised_s: float) -> bool | None:
    """Whether the candidate's steps are worth it; None: one more round will tell."""
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


# auto: plain gradients, unless a compressor has shown on this run's own steps that it pays.
#
# Two looks, the cheap one first. Before the run a sample is sent each way; where no candidate is
# much faster on the wire, plain ddp stays as torch has it. Otherwise the best one is put on trial:
# steps alternate between plain and it until `verdict` has seen enough, and from then on the faster
# way is used. Only whole steps can tell: an exchange that hides behind backward costs nothing,
# however long it takes.

_SAMPLE_BYTES = 4 * 2**20
_TRIES, _MORE_TRIES = 2, 3
"""Two at least: the first may be slow because the connection's window still grows."""
_PLAINLY_S = 0.1
"""What takes this long is a slow link's doing; more tries would only cost as much again."""
_WORTH_A_TRIAL = 0.8
"""On the wire alone; with backward beside it less is gained."""
_AS_FAST = 1.05
"""Candidates this close are equals, and the one named first in `allow` is tried."""
_LEAST_S = 1e-3
"""What cannot save more than this a step is not looked into: the hook itself costs some of it."""
_UNCOUNTED_STEPS = 2


@dataclass(frozen=True)
class OnTheWire:
    """Seconds to exchange all gradients once, by the sample."""

    seconds: dict[str, float]

    def best(self) -> str:
        """The candidate for a trial; none when plain gradients are good enough."""
        plain = self.seconds["none"]
        others = {name: s for name, s in self.seconds.items() if name != "none"}
        fastest = min(others.values(), default=plain)
        if fastest > _WORTH_A_TRIAL * plain or plain - fastest < _LEAST_S:
            return "none"
        return next(name for name, s in others.items() if s <= _AS_FAST * fastest)

    def saved_s(self, name: str) -> float:
        """What a candidate promises to save a step."""
        return self.seconds["none"] - self.seconds[name]

    def __str__(self) -> str:
        words = {"none": "plain"}
        return ", ".join(f"{words.get(n, n)} {s * 1e3:.1f} ms" for n, s in self.seconds.items())


class _Sample:
    """A bucket of one square matrix, as far as a compressor looks at it."""

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
    """Send a sample each way. A collective call; every rank gets the same figures."""
    side = max(1, int((min(gradient_bytes, _SAMPLE_BYTES) / 4) ** 0.5))
    scale = gradient_bytes / (4 * side * side)
    seconds = {}
    for name in ("none", *config.allow):
        compressor = begins_at_once(name, config, group)
        for _ in range(2):  # the first ones open connections, and PowerSGD's are plain
            _time(compressor, 1, group, device)
        seconds[name] = _shortest(compressor, side, group, device) * scale
    return OnTheWire(seconds)


def begins_at_once(name: str, config: Communication, group: dist.ProcessGroup) -> Compressor:
    """PowerSGD's first steps are plain; as many as it may have, and a trial would see no others."""
    powersgd = config.powersgd.model_copy(update={"start_step": 2})
    return compressor_for(name, config.model_copy(update={"powersgd": powersgd}), group)


def _shortest(
    compressor: Compressor, side: int, group: dist.ProcessGroup, device: torch.device
) -> float:
    """Of a few tries, and of some more where they are cheap. The slowest rank's."""

    def best_of(tries: int) -> float:
        taken_s = min(_time(compressor, side, group, device) for _ in range(tries))
        return _slowest([taken_s], group, device)[0]

    shortest = best_of(_TRIES)
    return shortest if shortest > _PLAINLY_S else min(shortest, best_of(_MORE_TRIES))


def _slowest(seconds: list[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """The slowest rank's, on all ranks: what is decided from it, all decide alike."""
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
    """Of its own: the run's random streams are not touched."""
    return torch.Generator(device).manual_seed(0)


class Trial:
    """Plain and a candidate by turns, then whichever made the shorter steps."""

    name = "auto"

    def __init__(
        self, plain: Plain, candidate: Compressor, promised_s: float, device: torch.device
    ) -> None:
        self.when_settled: Callable[[str, str], None] | None = None
        """Told the choice and its reason."""
        self._plain, self._candidate = plain, candidate
        self._promised_s, self._device = promised_s, device
        self._now: Compressor = candidate
        self._is_settled = False
        self._clock = clock_of(accelerator_of(device))
        self._began: Moment = None
        self._num_steps = 0
        self._taken_s: list[float] = []
        """This rank's steps of the present round."""
        self._plain_s: list[float] = []
        self._candidate_s: list[float] = []

    @property
    def choice(self) -> str:
        """The name it ended with; empty while it goes on."""
        return self._now.name if self._is_settled else ""

    def exchange(self, bucket: GradBucket) -> Mean:
        """As it is this step's turn. The first bucket of a step is always the one of index 0."""
        if not self._is_settled and bucket.index() == 0:
            self._turn()
        return self._now.exchange(bucket)

    def _turn(self) -> None:
        """One step is over, from first bucket to first bucket; whose turn is the next?

        The first steps only warm up, with the candidate: on a slow link plain ones are dear.
        """
        if self._num_steps > _UNCOUNTED_STEPS:
            now = self._clock.now()
            self._clock.wait_for(now)  # a few steps of the trial wait for the device, then none
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
        """Look at the figures that all ranks have."""
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
            + ("" if does_pay else f"; below {WORTH_KEEPING:.0%} it would have been {name}"),
        )

    def state_dict(self) -> dict[str, Any]:
        """The choice, if it was made: it stays for the run."""
        return {
            "candidate": self._candidate.name,
            "choice": self.choice,
            "state": self._candidate.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep to the choice."""
        if state["candidate"] != self._candidate.name:
            return  # the wire was another one; what was learnt there does not hold here
        self._candidate.load_state_dict(state["state"])
        if state["choice"]:
            is_plain = state["choice"] == self._plain.name
            self._now = self._plain if is_plain else self._candidate
            self._is_settled = True


# A DDP-wrapped model gets what `communication` asks for.


@dataclass(frozen=True)
class Installed:
    """What was put in, and why where that was for us to choose."""

    compressor: Compressor | None = None
    """None: torch's own all-reduce, with nothing in between."""
    why_none: str = ""
    """Why auto left it at that."""
    note: str = ""


def install_compression(
    config: Communication, wrapped: DistributedDataParallel, device: torch.device
) -> Installed:
    """Register the hook, if one is asked for. A collective call with auto."""
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
        return Installed(why_none=f"the gradients would take: {wire}")
    candidate = begins_at_once(best, config, group)
    trial = Trial(Plain(group), candidate, wire.saved_s(best), device)
    install(trial, wrapped)
    return Installed(trial, note=f"communication: {best} is on trial; on the wire: {wire}")
