"""The four all-reduces of phase 1: sums, places, bytes, rounds, and a training that uses them.

Rank r contributes 16^r to every element, so that the digits of a wrong sum show how often each rank
was counted. A second tensor has its own indices as values, which show where a chunk has gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log2
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.core.text import readable_bytes
from drivetrain.learn.attempt import Outcome, Shortcoming, num_ranks_in_words, run_on_ranks
from drivetrain.learn.training import (
    NUM_STEPS,
    global_batch,
    gradient_norm,
    new_model,
    new_optimizer,
    on_one_process,
    require_same_training,
)
from drivetrain.learn.verdict import Passed, Score
from drivetrain.verify.parity.compare import StepNumbers

BASE = 16
_LARGE = 9240  # divisible by every world size used
_SLACK = 1.05


@dataclass(frozen=True)
class AllReduce:
    """The requirements of one algorithm."""

    function: str
    num_ranks: tuple[int, ...]
    lengths: tuple[int, ...]
    most_rounds: Callable[[int], int] | None
    most_bytes: Callable[[int, int], float]
    """Most bytes that a rank may send, from the number of ranks and the bytes of the tensor."""
    bytes_formula: str
    rounds_formula: str = ""
    only_next: bool = False
    """True if rank r may send only to rank r + 1."""


NAIVE = AllReduce(
    "naive_all_reduce",
    (1, 2, 3, 4),
    (1, 10),
    None,
    lambda n, size: (n - 1) * size,
    "(n−1)·S",
)
TREE = AllReduce(
    "tree_all_reduce",
    (1, 2, 3, 4, 5, 8),
    (1, 10),
    lambda n: 2 * ceil(log2(n)),
    lambda n, size: ceil(log2(n)) * size,
    "log₂n·S",
    "2·⌈log₂n⌉",
)
HALVING = AllReduce(
    "halving_all_reduce",
    (1, 2, 4, 8),
    (8, 10, 3),
    lambda n: 2 * ceil(log2(n)),
    lambda n, size: 2 * (n - 1) / n * size,
    "2(n−1)/n·S",
    "2·log₂n",
)
RING = AllReduce(
    "ring_all_reduce",
    (1, 2, 3, 4),
    (12, 10, 2),
    lambda n: 2 * (n - 1),
    lambda n, size: 2 * (n - 1) / n * size,
    "2(n−1)/n·S",
    "2(n−1)",
    only_next=True,
)


def check_naive(file: Path) -> Passed:
    return _check(file, NAIVE)


def check_tree(file: Path) -> Passed:
    return _check(file, TREE)


def check_halving(file: Path) -> Passed:
    return _check(file, HALVING)


def check_ring(file: Path) -> Passed:
    return _check(file, RING)


def _check(file: Path, asked: AllReduce) -> Passed:
    passed = Passed()
    for num_ranks in asked.num_ranks:
        outcome = run_on_ranks(file, _reductions, num_ranks, (asked.function, asked.lengths))
        _judge_sums(outcome, asked, num_ranks)
        _judge_messages(outcome, asked, num_ranks)
    worlds = ", ".join(map(str, asked.num_ranks))
    passed.lines.append(f"the sum is right on {worlds} ranks, for tensors of {_listed(asked)}")
    _judge_training(file, asked)
    passed.lines.append(f"a training on 4 ranks that uses it: {NUM_STEPS} losses as on one process")
    passed.scores = _scores(outcome)
    passed.picture = outcome.flow(_section(asked.lengths[0])).picture()
    return passed


def _listed(asked: AllReduce) -> str:
    return ", ".join(map(str, asked.lengths)) + f" and {_LARGE} elements"


def _section(length: int) -> str:
    return f"a tensor of {length} element{'s' if length != 1 else ''}"


def _reductions(
    module: Any, recorder: Any, function: str, lengths: Sequence[int]
) -> list[tuple[list[float], list[float]]]:
    reduce = getattr(module, function)
    results = []
    for length in lengths:
        recorder.section(_section(length))
        counted = torch.full((length,), float(BASE ** dist.get_rank()), dtype=torch.float64)
        reduce(counted)
        recorder.section(f"{_section(length)}, places")
        places = torch.arange(length, dtype=torch.float64)
        reduce(places)
        results.append((counted.tolist(), places.tolist()))
    recorder.section(_section(_LARGE))
    large = torch.ones(_LARGE)
    reduce(large)
    results.append(([float(large.min()), float(large.max())], []))
    return results


def _judge_sums(outcome: Outcome, asked: AllReduce, num_ranks: int) -> None:
    for index, length in enumerate(asked.lengths):
        where = f"{num_ranks_in_words(num_ranks)}, {_section(length)}"
        picture = outcome.flow(_section(length)).picture()
        counted = [result[index][0] for result in outcome.results]
        judge_counts(counted, num_ranks, where, picture)
        for rank, result in enumerate(outcome.results):
            places = result[index][1]
            if places != [float(num_ranks * place) for place in range(length)]:
                raise misplaced(places, rank, num_ranks, where, picture)
    for rank, result in enumerate(outcome.results):
        if result[-1][0] != [num_ranks, num_ranks]:
            least, most = result[-1][0]
            raise Shortcoming(
                "missing",
                f"{_LARGE} ones of float32 on {num_ranks} ranks sum to {num_ranks} everywhere",
                f"rank {rank} has values from {least:g} to {most:g}",
            )


def judge_counts(counted: list[list[float]], num_ranks: int, where: str, picture: str) -> None:
    right = float(sum(BASE**rank for rank in range(num_ranks)))
    expected = "on every rank, each element is the sum of all ranks' values, each counted once"
    wrong = [rank for rank, values in enumerate(counted) if any(v != right for v in values)]
    if not wrong:
        return
    found, hints = [], []
    for rank in wrong:
        first, last, value = _first_wrong(counted[rank], right)
        words, hint = _decoded(value, rank, num_ranks)
        elements = f"element {first}" if first == last else f"elements {first} to {last}"
        found.append(f"rank {rank}, {elements}: {words}")
        hints.append(hint)
    if len(wrong) < num_ranks:
        fine = [str(rank) for rank in range(num_ranks) if rank not in wrong]
        found.append(f"right on rank{'s' if len(fine) > 1 else ''} {', '.join(fine)}")
    hint = next((h for h in _WORST_FIRST if h in hints), hints[0])
    if hint == "own-values" and (0 not in wrong or any(right in counted[r] for r in wrong)):
        hint = "not-handed-on"
    raise Shortcoming(hint, expected, "\n".join(found), where=where, picture=picture)


_WORST_FIRST = ("averaged", "counted-twice", "garbage", "missing", "own-values")


def _first_wrong(values: list[float], right: float) -> tuple[int, int, float]:
    """Return the first run of elements with the same wrong value."""
    first = next(i for i, v in enumerate(values) if v != right)
    last = first
    while last + 1 < len(values) and values[last + 1] == values[first]:
        last += 1
    return first, last, values[first]


def _decoded(value: float, rank: int, num_ranks: int) -> tuple[str, str]:
    """Describe which ranks a wrong sum contains, and return the hint."""
    if value == float(BASE**rank):
        return "still this rank's own value", "own-values"
    all_once = sum(BASE**r for r in range(num_ranks))
    if abs(value * num_ranks - all_once) < 1e-6 * all_once:
        return "the average, not the sum", "averaged"
    counts = _digits(value, num_ranks)
    if counts is None:
        return f"{value:g}, which is not a sum of the ranks' values", "garbage"
    missing = [r for r, count in enumerate(counts) if count == 0]
    several = [(r, count) for r, count in enumerate(counts) if count > 1]
    words = [f"rank {r} counted {count} times" for r, count in several]
    words += [f"rank {r} missing" for r in missing]
    return ", ".join(words), "counted-twice" if several else "missing"


def _digits(value: float, num_ranks: int) -> list[int] | None:
    if value != int(value) or not 0 <= value < BASE**num_ranks:
        return None
    rest, digits = int(value), []
    for _ in range(num_ranks):
        rest, digit = divmod(rest, BASE)
        digits.append(digit)
    return digits


def misplaced(
    places: list[float], rank: int, num_ranks: int, where: str, picture: str
) -> Shortcoming:
    first = next(i for i, v in enumerate(places) if v != num_ranks * i)
    return Shortcoming(
        "wrong-place",
        f"element {first} of the result is the sum of the ranks' elements {first}",
        f"rank {rank}: element {first} is a sum of other elements"
        f" ({places[first]:g} instead of {num_ranks * first})",
        where=where,
        picture=picture,
    )


def _judge_messages(outcome: Outcome, asked: AllReduce, num_ranks: int) -> None:
    for name in outcome.sections:
        flow = outcome.flow(name)
        where = f"{num_ranks_in_words(num_ranks)}, {name}"
        for log in flow.logs:
            if log.collectives:
                call = log.collectives[0]
                raise Shortcoming(
                    "not-point-to-point",
                    "only send, recv, isend, irecv and batch_isend_irecv: write the rest yourself",
                    f"rank {log.rank} called {call.kind} in line {call.line}",
                    where=where,
                )
            for call in log.of("send") if asked.only_next else ():
                if call.peer != (log.rank + 1) % num_ranks:
                    raise Shortcoming(
                        "not-a-ring",
                        f"rank {log.rank} sends to rank {(log.rank + 1) % num_ranks} only",
                        f"it sent to rank {call.peer} in line {call.line}",
                        where=where,
                        picture=flow.picture(),
                    )
    flow = outcome.flow(_section(_LARGE))
    _judge_bytes(flow.sent(), asked, num_ranks, flow.picture())
    num_rounds = len(flow.rounds())
    if asked.most_rounds is not None and num_rounds > asked.most_rounds(num_ranks):
        raise Shortcoming(
            "too-many-rounds",
            f"{asked.most_rounds(num_ranks)} rounds on {num_ranks} ranks ({asked.rounds_formula}):"
            " ranks send and receive at the same time",
            f"{num_rounds} rounds, each waiting for the previous one",
            where=f"{num_ranks} ranks",
            picture=flow.picture(),
        )


def _judge_bytes(sent: list[float], asked: AllReduce, num_ranks: int, picture: str) -> None:
    size = _LARGE * 4
    limit = asked.most_bytes(num_ranks, size)
    busiest = max(range(num_ranks), key=lambda rank: sent[rank])
    if sent[busiest] > limit * _SLACK:
        raise Shortcoming(
            "too-many-bytes",
            f"no rank sends more than {asked.bytes_formula} = {readable_bytes(limit)}"
            f" (S = {readable_bytes(size)}, n = {num_ranks})",
            f"rank {busiest} sent {readable_bytes(sent[busiest])},"
            f" {sent[busiest] / limit:.2g} times as much",
            where=f"{num_ranks} ranks, {_LARGE} elements",
            picture=picture,
        )


def _scores(outcome: Outcome) -> list[Score]:
    num_ranks = len(outcome.records)
    flow = outcome.flow(_section(_LARGE))
    least = 2 * (num_ranks - 1) / num_ranks * _LARGE * 4
    num_rounds = len(flow.rounds())
    return [
        Score(
            f"bytes the busiest of {num_ranks} ranks sends", max(flow.sent()), least, "2(n−1)/n·S"
        ),
        Score(
            f"rounds on {num_ranks} ranks", num_rounds, ceil(log2(num_ranks)), "⌈log₂n⌉", "rounds"
        ),
    ]


def _judge_training(file: Path, asked: AllReduce) -> None:
    num_ranks = 4
    outcome = run_on_ranks(file, _train, num_ranks, (asked.function,))
    reference, _ = on_one_process()
    losses = {
        step: sum(result[step].loss for result in outcome.results) / num_ranks for step in reference
    }
    for rank, result in enumerate(outcome.results):
        numbers = {step: result[step]._replace(loss=losses[step]) for step in reference}
        where = f"a training on {num_ranks} ranks, rank {rank}"
        require_same_training(reference, numbers, "missing", where=where)


def _train(module: Any, _: Any, function: str) -> dict[int, StepNumbers]:
    """Train data parallel, with the learner's function between backward and step."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = new_model()
    optimizer = new_optimizer(model)
    numbers = {}
    for step in range(1, NUM_STEPS + 1):
        inputs, classes = (part[rank::num_ranks] for part in global_batch(step))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), classes)
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        getattr(module, function)(flat)
        _put_back(flat / num_ranks, model)
        numbers[step] = StepNumbers(float(loss.detach()), gradient_norm(model))
        optimizer.step()
    return numbers


def _put_back(flat: torch.Tensor, model: torch.nn.Module) -> None:
    begin = 0
    for parameter in model.parameters():
        size = parameter.numel()
        parameter.grad = flat[begin : begin + size].view_as(parameter).clone()
        begin += size
