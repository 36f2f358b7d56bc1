"""auto: plain gradients, unless a compressor has shown on this run's own steps that it pays.

Two looks, the cheap one first. Before the run a sample is sent each way; where no candidate is much
faster on the wire, plain ddp stays as torch has it. Otherwise the best one is put on trial: the
first steps alternate between plain and it, and from then on the faster way is used. Only whole
steps can tell: an exchange that hides behind backward costs nothing, however long it takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from drivetrain.config.schema import Communication
from drivetrain.parallel.communication.choose import compressor_for
from drivetrain.parallel.communication.compressor import Compressor, Mean
from drivetrain.parallel.communication.half import Plain

_SAMPLE_BYTES = 4 * 2**20
_REPEATS = 3
_WORTH_A_TRIAL = 0.8
"""On the wire alone; with backward beside it less is gained."""
_AS_FAST = 1.05
"""Candidates this close are equals, and the one named first in `allow` is tried."""
_LEAST_S = 1e-3
"""What cannot save more than this a step is not looked into: the hook itself costs some of it."""
_UNCOUNTED_STEPS, _ROUNDS = 2, 5
_WORTH_KEEPING = 0.95
"""Of a whole step; steps differ by themselves, and in doubt gradients stay plain."""


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
    at_once = config.model_copy(
        update={"powersgd": config.powersgd.model_copy(update={"start_step": 2})}
    )
    names = ("none", *config.allow)
    times = []
    for name in names:
        compressor = compressor_for(name, at_once, group)
        taken = [_time(compressor, side, group, device) for _ in range(_REPEATS + 2)]
        times.append(min(taken[2:]))  # the first ones open connections, and PowerSGD's are plain
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return OnTheWire({name: s * scale for name, s in zip(names, slowest.tolist(), strict=True)})


def _time(
    compressor: Compressor, side: int, group: dist.ProcessGroup, device: torch.device
) -> float:
    bucket: Any = _Sample(torch.randn(side, side, device=device, generator=_generator(device)))
    dist.barrier(group)
    began = time.perf_counter()
    compressor.exchange(bucket).wait()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _generator(device: torch.device) -> torch.Generator:
    """Of its own: the run's random streams are not touched."""
    return torch.Generator(device).manual_seed(0)


class Trial:
    """Plain and a candidate by turns, then whichever made the shorter steps."""

    name = "auto"

    def __init__(
        self, plain: Plain, candidate: Compressor, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.when_settled: Callable[[str, str], None] | None = None
        """Told the choice and its reason."""
        self._plain, self._candidate = plain, candidate
        self._group, self._device = group, device
        self._now: Compressor = plain
        self._is_settled = False
        self._began_s: float | None = None
        self._num_steps = 0
        self._times: dict[str, list[float]] = {plain.name: [], candidate.name: []}

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
        """One step is over, from first bucket to first bucket; whose turn is the next?"""
        now_s = time.perf_counter()
        if self._began_s is not None and self._num_steps > _UNCOUNTED_STEPS:
            self._times[self._now.name].append(now_s - self._began_s)
        if self._num_steps == _UNCOUNTED_STEPS + 2 * _ROUNDS:
            self._settle()
            return
        self._now = self._plain if self._num_steps % 2 == 0 else self._candidate
        self._num_steps += 1
        self._began_s = now_s

    def _settle(self) -> None:
        """By the slowest rank's figures, so that all decide alike."""
        medians = [median(self._times[each.name]) for each in (self._plain, self._candidate)]
        slowest = torch.tensor(medians, dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._group)
        plain_s, candidate_s = slowest.tolist()
        pays = candidate_s < _WORTH_KEEPING * plain_s
        self._now = self._candidate if pays else self._plain
        self._is_settled = True
        if self.when_settled is not None:
            name = self._candidate.name
            self.when_settled(
                self._now.name,
                f"a step took {plain_s * 1e3:.1f} ms with plain gradients and "
                f"{candidate_s * 1e3:.1f} ms with {name}, medians of {_ROUNDS}"
                + ("" if pays else f"; below {_WORTH_KEEPING:.0%} it would have been {name}"),
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
