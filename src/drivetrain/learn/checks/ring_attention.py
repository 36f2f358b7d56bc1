"""Ring attention: equal to attention over the whole sequence, block by block, in a ring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.core.text import readable_bytes
from drivetrain.learn.attempt import Outcome, Shortcoming, run_on_ranks
from drivetrain.learn.verdict import Passed, Score

_NUM_RANKS = 4
_LENGTH, _WIDTH = 6, 8
_SLACK = 1.05


@dataclass(frozen=True)
class _Case:
    name: str
    is_causal: bool
    scale: float = 1.0


_PLAIN = _Case("every token attends to all", False)
_CAUSAL = _Case("causal", True)
_LARGE = _Case("large scores", False, 12.0)
_CASES = (_PLAIN, _CAUSAL, _LARGE)


def check(file: Path) -> Passed:
    outcome = run_on_ranks(file, _attend, _NUM_RANKS)
    _judge_messages(outcome)
    for case in _CASES:
        for rank in range(_NUM_RANKS):
            _judge(torch.tensor(outcome.results[rank][case.name]), rank, case, outcome)
    flow = outcome.flow(_PLAIN.name)
    num_rounds = len(flow.rounds())
    return Passed(
        [
            f"{_NUM_RANKS} ranks with {_LENGTH} tokens each: equal to attention over all"
            f" {_NUM_RANKS * _LENGTH}, with and without a causal mask, and with scores up to"
            f" {_largest_score():.0f}",
        ],
        [
            Score("bytes a rank sends", max(flow.sent()), _least(), "(n−1)·(K + V)"),
            Score("rounds", num_rounds, _NUM_RANKS - 1, "n−1", "rounds"),
        ],
        flow.picture(),
    )


def _least() -> float:
    return (_NUM_RANKS - 1) * 2 * _LENGTH * _WIDTH * 4


def _whole(case: _Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (_NUM_RANKS * _LENGTH, _WIDTH)
    queries, keys, values = (torch.randn(shape, generator=generator) for _ in range(3))
    return queries * case.scale, keys * case.scale, values


def _largest_score() -> float:
    queries, keys, _ = _whole(_LARGE)
    return float((queries @ keys.T).max() / _WIDTH**0.5)


def _block(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    return tensor[rank * _LENGTH : (rank + 1) * _LENGTH].clone()


def _attend(module: Any, recorder: Any) -> dict[str, Any]:
    rank = dist.get_rank()
    results = {}
    for case in _CASES:
        recorder.section(case.name)
        own = [_block(tensor, rank) for tensor in _whole(case)]
        results[case.name] = module.ring_attention(*own, case.is_causal).tolist()
    return results


def _attention(
    case: _Case, rank: int, blocks: Sequence[int], is_causal: bool, scale: float
) -> torch.Tensor:
    """Return the attention of a rank's queries over some blocks."""
    queries, keys, values = _whole(case)
    places = torch.cat([torch.arange(b * _LENGTH, (b + 1) * _LENGTH) for b in blocks])
    scores = _block(queries, rank) @ keys[places].T * scale
    if is_causal:
        own = rank * _LENGTH + torch.arange(_LENGTH)
        scores[places[None, :] > own[:, None]] = -torch.inf
    return torch.softmax(scores, dim=1) @ values[places]


def _judge(found: torch.Tensor, rank: int, case: _Case, outcome: Outcome) -> None:
    every = range(_NUM_RANKS)
    right = _attention(case, rank, every, case.is_causal, _WIDTH**-0.5)
    if found.shape == right.shape and torch.allclose(found, right, atol=2e-4):
        return
    hint, words = _explained(found, rank, case)
    raise Shortcoming(
        hint,
        "the outputs of attention over the whole sequence",
        f"rank {rank}: {words}",
        where=case.name,
        picture=outcome.flow(case.name).picture(),
    )


def _explained(found: torch.Tensor, rank: int, case: _Case) -> tuple[str, str]:
    if found.shape != (_LENGTH, _WIDTH):
        return "shape", f"a tensor of shape {tuple(found.shape)}, not {(_LENGTH, _WIDTH)}"
    if not bool(found.isfinite().all()):
        if case is _LARGE:
            return "overflow", "nan or infinity: exp of a score above 88 overflows float32"
        return "masked-block", "nan or infinity"
    for hint, words, candidate in _mistakes(rank, case):
        if torch.allclose(found, candidate, atol=2e-4):
            return hint, words
    if case.is_causal:
        return "wrong-positions", "wrong values, although they are right without the mask"
    off = float(
        (found - _attention(case, rank, range(_NUM_RANKS), False, _WIDTH**-0.5)).abs().max()
    )
    return "running-softmax", f"outputs are off by up to {off:.3g}"


def _mistakes(rank: int, case: _Case) -> Iterator[tuple[str, str, torch.Tensor]]:
    every, scale = list(range(_NUM_RANKS)), _WIDTH**-0.5
    if case.is_causal:
        yield "not-masked", "later tokens count too", _attention(case, rank, every, False, scale)
    yield (
        "not-scaled",
        "the scores are not divided by √width",
        _attention(case, rank, every, case.is_causal, 1.0),
    )
    yield (
        "one-block",
        "only its own block counts",
        _attention(case, rank, [rank], case.is_causal, scale),
    )
    for block in every if not case.is_causal else ():
        others = [each for each in every if each != block]
        yield (
            "missing-block",
            f"the keys and values of rank {block} are missing",
            _attention(case, rank, others, False, scale),
        )
        twice = [*every, block]
        yield (
            "block-twice",
            f"the keys and values of rank {block} count twice",
            _attention(case, rank, twice, False, scale),
        )
    if not case.is_causal:
        alone = [_attention(case, rank, [block], False, scale) for block in every]
        yield "mean-of-blocks", "the mean of one softmax per block", torch.stack(alone).mean(0)


def _judge_messages(outcome: Outcome) -> None:
    flow = outcome.flow(_PLAIN.name)
    for log in flow.logs:
        if log.collectives:
            call = log.collectives[0]
            raise Shortcoming(
                "not-point-to-point",
                "only send, recv, isend, irecv and batch_isend_irecv: blocks travel round the ring",
                f"rank {log.rank} called {call.kind} in line {call.line}",
            )
        for call in log.of("send"):
            if call.peer != (log.rank + 1) % _NUM_RANKS:
                raise Shortcoming(
                    "not-a-ring",
                    f"rank {log.rank} sends to rank {(log.rank + 1) % _NUM_RANKS} only",
                    f"it sent to rank {call.peer} in line {call.line}",
                    picture=flow.picture(),
                )
    sent, least = max(flow.sent()), _least()
    if sent > least * _SLACK:
        raise Shortcoming(
            "too-many-bytes",
            f"every rank sends n−1 = {_NUM_RANKS - 1} blocks of keys and values,"
            f" {readable_bytes(least)}",
            f"{readable_bytes(sent)}, {sent / least:.2g} times as much",
            picture=flow.picture(),
        )
