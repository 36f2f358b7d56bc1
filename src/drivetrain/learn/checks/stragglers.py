"""Stragglers: given tables of times, then ranks of which one is slow."""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.learn.attempt import Outcome, Shortcoming, in_this_process, run_on_ranks
from drivetrain.learn.verdict import Passed, Score

_FACTOR = 1.3
_NUM_STEPS = 12
_SLOW_RANK = 1
_USUAL_S, _SLOW_S = 0.03, 0.07
Times = list[list[float]]


def check(file: Path) -> Passed:
    in_this_process(file, _judge_timer)
    in_this_process(file, _judge_tables)
    in_this_process(file, _judge_choice)
    outcome = run_on_ranks(file, _train, 3)
    _judge_found(outcome)
    sent = max(outcome.flow("gather").sent())
    least = 2 / 3 * 3 * _NUM_STEPS * 8
    return Passed(
        [
            f"{len(_tables())} tables of step times: stragglers are named, hiccups are not",
            f"3 ranks, of which rank {_SLOW_RANK} computes {_SLOW_S / _USUAL_S:.1f} times as long:"
            " every rank names it",
        ],
        [Score("bytes a rank sends for its times", sent, least, "(n−1)/n·(all times)")],
    )


def _noise(num_ranks: int = 8, num_steps: int = 20) -> Times:
    drawn = torch.rand(num_ranks, num_steps, generator=torch.Generator().manual_seed(4))
    times: Times = (0.1 + 0.005 * drawn).tolist()
    return times


def _slowed(times: Times, rank: int, by: float) -> Times:
    return [
        [t * by for t in steps] if number == rank else steps for number, steps in enumerate(times)
    ]


def _tables() -> list[tuple[str, str, Times, list[int]]]:
    hiccup = _noise()
    hiccup[2][7] = 3.0
    cold = [[2.0, *steps[1:]] for steps in _noise()]
    later = [[*steps[:10], *(2 * t for t in steps[10:])] for steps in _noise()]
    extreme = _slowed(_slowed(_noise(), 3, 1.5), 0, 40.0)
    return [
        ("rank 5 takes 1.5 times as long", "missed", _slowed(_noise(), 5, 1.5), [5]),
        ("all take equally long", "nobody-is-slow", _noise(), []),
        ("rank 2 had one step of 3 s", "one-hiccup", hiccup, []),
        ("rank 4 takes 1.15 times as long", "too-eager", _slowed(_noise(), 4, 1.15), []),
        ("the first step was long on all ranks", "all-slow", cold, []),
        ("all take twice as long from step 10 on", "all-slow", later, []),
        ("ranks 1 and 6 take twice as long", "missed",
         _slowed(_slowed(_noise(), 1, 2.0), 6, 2.0), [1, 6]),
        ("rank 0 takes 40 times as long, rank 3 1.5 times", "hidden", extreme, [0, 3]),
        ("rank 7 takes half as long", "nobody-is-slow", _slowed(_noise(), 7, 0.5), []),
    ]  # fmt: skip


def _judge_tables(module: ModuleType) -> None:
    for where, hint, times, right in _tables():
        found = [int(rank) for rank in module.find_stragglers(times, _FACTOR)]
        if found != right:
            raise Shortcoming(
                "too-eager" if hint == "missed" and set(found) - set(right) else hint,
                f"stragglers {right} of 8 ranks, with factor {_FACTOR:g}",
                f"{found}",
                where=where,
            )


def _judge_timer(module: ModuleType) -> None:
    for _ in range(3):
        computed, exchanged = module.timed_step(lambda: time.sleep(0.05), lambda: time.sleep(0.15))
        found = (float(computed), float(exchanged))
        if 0.05 <= found[0] < 0.1 and 0.15 <= found[1] < 0.25:
            break
    else:
        raise Shortcoming(
            "waiting-counted",
            "0.05 s of computing and 0.15 s of exchange, measured separately",
            f"{found[0]:.3f} s and {found[1]:.3f} s",
        )


def _judge_choice(module: ModuleType) -> None:
    if module.which_time((1.0, 2.0)) == 2.0:
        raise Shortcoming(
            "waiting-is-not-slowness",
            "the time in which a straggler differs from the ranks that wait for it",
            "the time of the exchange, which is shortest on the straggler",
        )


def _train(module: Any, recorder: Any) -> Any:
    gradient = torch.ones(100)
    seconds = _SLOW_S if dist.get_rank() == _SLOW_RANK else _USUAL_S

    def exchange() -> None:
        dist.all_reduce(gradient)

    recorder.section("steps")
    steps = [module.timed_step(lambda: time.sleep(seconds), exchange) for _ in range(_NUM_STEPS)]
    own = [float(module.which_time(step)) for step in steps]
    recorder.section("gather")
    times = [[float(t) for t in row] for row in module.gather_times(own)]
    return own, times, [int(rank) for rank in module.find_stragglers(times, _FACTOR)]


def _judge_found(outcome: Outcome) -> None:
    own = [result[0] for result in outcome.results]
    flow = outcome.flow("gather")
    for rank, (_, times, found) in enumerate(outcome.results):
        if times != own:
            expected = "gather_times returns the times of all ranks, by rank, unchanged"
            said = f"rank {rank} got {len(times)} rows with different values"
            raise Shortcoming("not-gathered", expected, said, picture=flow.picture())
        if found != [_SLOW_RANK]:
            expected = f"rank {_SLOW_RANK}, which computes {_SLOW_S / _USUAL_S:.1f} times as long"
            medians = ", ".join(f"{sorted(t)[len(t) // 2] * 1e3:.0f} ms" for t in own)
            said = f"{found}; the ranks' usual times were {medians}"
            raise Shortcoming("waiting-counted", expected, said, where=f"rank {rank} of 3")
    for log in flow.logs:
        if len(log.calls) > 1:
            raise Shortcoming(
                "too-many-messages",
                "one collective for the times of all steps",
                f"rank {log.rank} made {len(log.calls)} calls",
                picture=flow.picture(),
            )
