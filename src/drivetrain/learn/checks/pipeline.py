"""Pipelines: schedules are judged without ranks, then run on ranks that sleep instead of computing.

A sleeping rank needs no core, so four stages overlap on two cores as on four devices.
"""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.learn.attempt import Shortcoming, in_this_process, run_on_ranks
from drivetrain.learn.training import samples
from drivetrain.learn.verdict import Passed, Score
from drivetrain.verify.parity.compare import relative

Schedule = list[tuple[str, int]]
_FORWARD_S, _BACKWARD_S = 0.03, 0.06
_UNITS = {"forward": 1, "backward": 2}
_TOKENS, _WIDTH = 6, 12
_SIZES = ((1, 3), (2, 1), (2, 4), (3, 5), (4, 8), (4, 2))
_NAMES = ("gpipe", "one_f_one_b")
_RUNS = (("gpipe", 2, 4), ("gpipe", 3, 6), ("one_f_one_b", 3, 6))
_ALLOWED_BUBBLE = 0.12
"""Tolerance beyond the schedule's own bubble: messages and wake-ups take time."""


def check(file: Path) -> Passed:
    in_this_process(file, _judge_schedules)
    for name, num_stages, num_micro_batches in _RUNS:
        bubble, held = _judged_run(file, name, num_stages, num_micro_batches)
    return Passed(
        [
            f"both schedules for 1 to 4 stages and 1 to 8 micro-batches, {len(_SIZES)} sizes each",
            "gradients of every stage as on one process: GPipe on 2 and 3 ranks, 1F1B on 3",
        ],
        [
            Score(
                f"bubble of 1F1B, {num_stages} stages, {num_micro_batches} micro-batches",
                round(bubble, 3),
                round(_least_bubble(num_stages, num_micro_batches), 3),
                "(p−1)/(m+p−1)",
                "of the time",
            ),
            Score("held by the first stage", held, num_stages, "p", "micro-batches"),
        ],
        _drawn(file, num_stages, num_micro_batches),
    )


def _least_bubble(num_stages: int, num_micro_batches: int) -> float:
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


def _schedules(module: Any, name: str, num_stages: int, num_micro: int) -> list[Schedule]:
    make = getattr(module, name)
    return [
        [(str(what), int(i)) for what, i in make(stage, num_stages, num_micro)]
        for stage in range(num_stages)
    ]


def _judge_schedules(module: ModuleType) -> None:
    for name in _NAMES:
        for num_stages, num_micro in _SIZES:
            schedules = _schedules(module, name, num_stages, num_micro)
            where = f"{name}, {num_stages} stages, {num_micro} micro-batches"
            for stage, schedule in enumerate(schedules):
                _judge_complete(schedule, num_micro, f"{where}, stage {stage}")
            if name == "gpipe":
                _judge_gpipe(schedules, num_micro, where)
            else:
                _judge_held(schedules, num_micro, where)
            _judge_orders(schedules, where)
            _judge_time(schedules, num_micro, where)


def _judge_complete(schedule: Schedule, num_micro: int, where: str) -> None:
    expected = f"forward and backward of each of the micro-batches 0 to {num_micro - 1}, once"
    for what in _UNITS:
        numbers = [i for kind, i in schedule if kind == what]
        if sorted(numbers) != list(range(num_micro)):
            found = f"{what} of {numbers}"
            raise Shortcoming("incomplete-schedule", expected, found, where=where)
    for i in range(num_micro):
        if schedule.index(("backward", i)) < schedule.index(("forward", i)):
            found = f"backward of {i} before its forward"
            raise Shortcoming("incomplete-schedule", expected, found, where=where)


def _judge_gpipe(schedules: list[Schedule], num_micro: int, where: str) -> None:
    for stage, schedule in enumerate(schedules):
        if any(what != "forward" for what, _ in schedule[:num_micro]):
            expected = "all forwards, then all backwards"
            found = f"stage {stage}: {_words(schedule)}"
            raise Shortcoming("not-gpipe", expected, found, where=where)


def _words(schedule: Schedule) -> str:
    return " ".join(f"{what[0].upper()}{i}" for what, i in schedule)


def _peak(schedule: Schedule) -> int:
    held = peak = 0
    for what, _ in schedule:
        held += 1 if what == "forward" else -1
        peak = max(peak, held)
    return peak


def _judge_held(schedules: list[Schedule], num_micro: int, where: str) -> None:
    for stage, schedule in enumerate(schedules):
        most = min(len(schedules) - stage, num_micro)
        if _peak(schedule) > most:
            raise Shortcoming(
                "held-too-many",
                f"stage {stage} holds at most {most} micro-batches",
                f"{_peak(schedule)}: {_words(schedule)}",
                where=where,
            )


def _judge_orders(schedules: list[Schedule], where: str) -> None:
    for stage, (here, there) in enumerate(pairwise(schedules)):
        for kind in _UNITS:
            orders = [[i for what, i in schedule if what == kind] for schedule in (here, there)]
            if orders[0] != orders[1]:
                raise Shortcoming(
                    "order-differs",
                    f"stages {stage} and {stage + 1} use the same order of micro-batches, since"
                    " messages arrive in the order in which they were sent",
                    f"{kind}: {orders[0]} and {orders[1]}",
                    where=where,
                )


def _judge_time(schedules: list[Schedule], num_micro: int, where: str) -> None:
    took, stuck = _simulated(schedules)
    if stuck:
        expected = "every stage finishes"
        raise Shortcoming("schedule-deadlock", expected, "\n".join(stuck), where=where)
    least = sum(_UNITS.values()) * (num_micro + len(schedules) - 1)
    if took > least:
        raise Shortcoming(
            "bubble",
            f"with a forward of 1 and a backward of 2 units, a step takes {least}:"
            " m + p − 1 of each",
            f"{took} units, because stages wait for each other",
            where=where,
            picture="\n".join(f"stage {s}  {_words(each)}" for s, each in enumerate(schedules)),
        )


def _simulated(schedules: list[Schedule]) -> tuple[int, list[str]]:
    """Return the time if messages take no time, and the stages that wait for ever."""
    done: dict[tuple[int, str, int], int] = {}
    clocks, at = [0] * len(schedules), [0] * len(schedules)
    is_moving = True
    while is_moving:
        is_moving = False
        for stage, schedule in enumerate(schedules):
            while at[stage] < len(schedule):
                what, i = schedule[at[stage]]
                other = stage - 1 if what == "forward" else stage + 1
                if 0 <= other < len(schedules):
                    if (other, what, i) not in done:
                        break
                    clocks[stage] = max(clocks[stage], done[other, what, i])
                clocks[stage] += _UNITS[what]
                done[stage, what, i] = clocks[stage]
                at[stage] += 1
                is_moving = True
    stuck = [
        f"stage {stage} waits at the {schedule[at[stage]][0]} of {schedule[at[stage]][1]}"
        for stage, schedule in enumerate(schedules)
        if at[stage] < len(schedule)
    ]
    return max(clocks), stuck


class Stage:
    """One part of the model; computing is simulated by sleeping, and timed."""

    def __init__(self, number: int, num_stages: int, num_micro: int, waits: bool = True) -> None:
        self.is_first, self.is_last = number == 0, number == num_stages - 1
        self.shape = (_TOKENS, _WIDTH)
        self.layer = _layer(number)
        self.busy_s = 0.0
        self.held = self.peak = 0
        self._scale = 1 / num_micro
        self._waits = waits
        self._graphs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, micro_batch: int, inputs: torch.Tensor | None) -> torch.Tensor | None:
        with self._timing(_FORWARD_S):
            own, classes = samples(_TOKENS, seed=80 + micro_batch)
            if inputs is None and not self.is_first:
                raise ValueError("only the first stage has its own inputs")
            leaf = (own if inputs is None else inputs).detach().clone().requires_grad_()
            outputs = torch.tanh(self.layer(leaf))
            if self.is_last:
                outputs = nn.functional.cross_entropy(outputs, classes) * self._scale
            self._graphs[micro_batch] = (leaf, outputs)
            self.held += 1
            self.peak = max(self.peak, self.held)
        return None if self.is_last else outputs.detach()

    def backward(self, micro_batch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        with self._timing(_BACKWARD_S):
            if gradient is None and not self.is_last:
                raise ValueError("only the last stage begins with its loss")
            leaf, outputs = self._graphs.pop(micro_batch)
            outputs.backward(gradient)
            self.held -= 1
        return None if self.is_first else leaf.grad

    def _timing(self, waits_s: float) -> _Timing:
        return _Timing(self, waits_s if self._waits else 0.0)


class _Timing:
    """Takes at least `waits_s`, and adds its duration to the stage's busy time."""

    def __init__(self, stage: Stage, waits_s: float) -> None:
        self._stage, self._waits_s = stage, waits_s

    def __enter__(self) -> None:
        self._begin_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        time.sleep(max(0.0, self._begin_s + self._waits_s - time.perf_counter()))
        self._stage.busy_s += time.perf_counter() - self._begin_s


def _layer(number: int) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(20 + number)
        return nn.Linear(_WIDTH, _WIDTH)


def _gradient(stage: Stage) -> list[float]:
    gradients = [p.grad if p.grad is not None else p * 0 for p in stage.layer.parameters()]
    return torch.cat([g.detach().flatten() for g in gradients]).tolist()


def _run_step(module: Any, recorder: Any, name: str, num_micro: int) -> Any:
    rank, num_stages = dist.get_rank(), dist.get_world_size()
    stage = Stage(rank, num_stages, num_micro)
    schedule = getattr(module, name)(rank, num_stages, num_micro)
    with recorder.paused():
        dist.barrier()
    begin_s = time.perf_counter()
    recorder.section("step")
    module.run(schedule, stage)
    took_s = time.perf_counter() - begin_s
    return _gradient(stage), stage.busy_s, took_s, stage.peak


def _on_one_process(num_stages: int, num_micro: int) -> list[list[float]]:
    stages = [Stage(s, num_stages, num_micro, waits=False) for s in range(num_stages)]
    for i in range(num_micro):
        passed: torch.Tensor | None = None
        for stage in stages:
            passed = stage.forward(i, passed)
        for stage in reversed(stages):
            passed = stage.backward(i, passed)
    return [_gradient(stage) for stage in stages]


def _judged_run(file: Path, name: str, num_stages: int, num_micro: int) -> tuple[float, int]:
    """Return the share of time that stages wait, and the peak of micro-batches in the first."""
    where = f"{name} on {num_stages} ranks, {num_micro} micro-batches"
    least = _least_bubble(num_stages, num_micro)
    bubble = 1.0
    # On a busy machine a correct one may take longer; a wrong one does so each time.
    for _ in range(3):
        outcome = run_on_ranks(file, _run_step, num_stages, (name, num_micro))
        _judge_gradients([result[0] for result in outcome.results], num_micro, where)
        took_s = max(result[2] for result in outcome.results)
        busy_s = sum(result[1] for result in outcome.results) / num_stages
        bubble = min(bubble, 1 - busy_s / took_s)
        if bubble <= least + _ALLOWED_BUBBLE:
            return bubble, outcome.results[0][3]
    raise Shortcoming(
        "stalls",
        f"stages wait {least:.0%} of the time, (p−1)/(m+p−1)",
        f"{bubble:.0%}: the schedule is right, but running it takes longer",
        where=where,
        picture=outcome.flow("step").picture(),
    )


def _judge_gradients(found: list[list[float]], num_micro: int, where: str) -> None:
    reference = _on_one_process(len(found), num_micro)
    for stage, (here, right) in enumerate(zip(found, reference, strict=True)):
        difference = (torch.tensor(here) - torch.tensor(right)).norm()
        if float(difference) > 1e-4 * float(torch.tensor(right).norm()):
            norms = [float(torch.tensor(values).norm()) for values in (right, here)]
            hint = "no-gradient" if norms[1] == 0 else "wrong-gradient"
            raise Shortcoming(
                hint,
                f"stage {stage}: gradient norm {norms[0]:.5f}, as on one process",
                f"{norms[1]:.5f}" + (", in another direction" if _same(norms) else ""),
                where=where,
            )


def _same(norms: list[float]) -> bool:
    return relative(norms[1], norms[0]) < 1e-2


def _drawn(file: Path, num_stages: int, num_micro: int) -> str:
    schedules: list[Schedule] = in_this_process(
        file, lambda module: _schedules(module, "one_f_one_b", num_stages, num_micro)
    )
    return "\n".join(f"stage {s}   {_words(each)}" for s, each in enumerate(schedules))
