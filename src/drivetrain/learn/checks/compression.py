"""Compressed all-reduces: few bytes, the largest part first, and eventually everything.

Some steps have gradients, the following ones zeros, in which what was left over must arrive.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.core.text import readable_bytes
from drivetrain.learn.attempt import Outcome, Shortcoming, run_on_ranks
from drivetrain.learn.verdict import Passed, Score

_NUM_RANKS = 3
_LENGTH, _SHARE = 200, 0.1
_ROWS, _COLUMNS, _RANK = 24, 16, 2
_NUM_GRADIENTS = 4
_NUM_ZEROS = 60
_SLACK = 1.05
_INT64_SLACK = 1.55
_TOP_K, _POWER = "TopK", "PowerSGD"


def check(file: Path) -> Passed:
    outcome = run_on_ranks(file, _compress, _NUM_RANKS)
    for name in (_TOP_K, _POWER):
        _judge_same(outcome, name)
        _judge_bytes(outcome, name)
        (_judge_entries if name == _TOP_K else _judge_matrix)(_found(outcome, name)[0])
        _judge_sum(outcome, name)
    return Passed(
        [
            f"{_TOP_K}: the {round(_SHARE * _LENGTH)} largest of {_LENGTH} entries, from each of"
            f" {_NUM_RANKS} ranks; {_POWER}: a projection of rank {_RANK}",
            f"{_NUM_GRADIENTS} gradients and then zeros: at the end, everything has arrived",
        ],
        [
            Score(f"bytes a rank sends a step, {name}", _sent(outcome, name), _least(name), formula)
            for name, formula in ((_TOP_K, "(n−1)·k·8"), (_POWER, "2(n−1)/n·r·(rows + columns)·4"))
        ],
        outcome.flow(_section(_TOP_K, 1)).picture(),
    )


def _section(name: str, step: int) -> str:
    return f"{name}, step {step}"


def _gradient(name: str, step: int, rank: int) -> torch.Tensor:
    """Return a gradient: similar on all ranks, as in a training, with few large entries."""
    if step > _NUM_GRADIENTS:
        return torch.zeros(_LENGTH if name == _TOP_K else (_ROWS, _COLUMNS))
    common = torch.Generator().manual_seed(step)
    own = torch.Generator().manual_seed(100 * step + rank)
    if name == _TOP_K:
        shared = torch.randn(_LENGTH, generator=common) ** 3
        return shared + 0.5 * torch.randn(_LENGTH, generator=own)
    left = torch.randn(_ROWS, 3, generator=common)
    right = torch.randn(3, _COLUMNS, generator=common)
    return left @ right + 0.3 * torch.randn(_ROWS, _COLUMNS, generator=own)


def _compress(module: Any, recorder: Any) -> dict[str, list[Any]]:
    results: dict[str, list[Any]] = {_TOP_K: [], _POWER: []}
    for name, compressor in (
        (_TOP_K, module.TopK(_SHARE)),
        (_POWER, module.PowerSGD(_RANK)),
    ):
        for step in range(1, _NUM_GRADIENTS + _NUM_ZEROS + 1):
            recorder.section(_section(name, step))
            gradient = _gradient(name, step, dist.get_rank())
            results[name].append(compressor.all_reduce(gradient).detach().tolist())
    return results


def _found(outcome: Outcome, name: str) -> list[torch.Tensor]:
    return [torch.tensor(each) for each in outcome.results[0][name]]


def _mean(name: str, step: int) -> torch.Tensor:
    return torch.stack([_gradient(name, step, rank) for rank in range(_NUM_RANKS)]).mean(0)


def _judge_same(outcome: Outcome, name: str) -> None:
    for rank, result in enumerate(outcome.results):
        if not torch.allclose(torch.tensor(result[name][0]), _found(outcome, name)[0], atol=1e-5):
            raise Shortcoming(
                "ranks-differ",
                "every rank gets the same result",
                f"those of ranks 0 and {rank} differ",
                where=_section(name, 1),
                picture=outcome.flow(_section(name, 1)).picture(),
            )


def _least(name: str) -> float:
    if name == _TOP_K:
        return (_NUM_RANKS - 1) * round(_SHARE * _LENGTH) * 8
    return 2 * (_NUM_RANKS - 1) / _NUM_RANKS * _RANK * (_ROWS + _COLUMNS) * 4


def _sent(outcome: Outcome, name: str) -> float:
    return max(outcome.flow(_section(name, 2)).sent())


def _judge_bytes(outcome: Outcome, name: str) -> None:
    sent, least = _sent(outcome, name), _least(name)
    if sent > least * (_INT64_SLACK if name == _TOP_K else _SLACK):
        raise Shortcoming(
            "too-many-bytes",
            f"about {readable_bytes(least)} a step: "
            + ("a value and an index per entry" if name == _TOP_K else "two thin matrices"),
            f"{readable_bytes(sent)}, {sent / least:.2g} times as much",
            where=_section(name, 2),
            picture=outcome.flow(_section(name, 2)).picture(),
        )


def _sparse(gradient: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    kept = torch.zeros_like(gradient)
    indices = by.topk(round(_SHARE * _LENGTH)).indices
    kept[indices] = gradient[indices]
    return kept


def _judge_entries(found: torch.Tensor) -> None:
    own = [_gradient(_TOP_K, 1, rank) for rank in range(_NUM_RANKS)]
    sent = torch.stack([_sparse(each, each.abs()) for each in own])
    signed = torch.stack([_sparse(each, each) for each in own])
    right = sent.mean(0)
    if torch.allclose(found, right, atol=1e-5):
        return
    last = torch.zeros(_LENGTH)
    for each in sent:
        last = torch.where(each != 0, each, last)
    for value, hint, words in (
        (right * _NUM_RANKS, "not-divided", f"{_NUM_RANKS} times as much in every entry"),
        (signed.mean(0), "signed", "the largest positive entries; large negative ones are missing"),
        (last / _NUM_RANKS, "overwritten", "of entries that several ranks sent, only one counts"),
        (last, "overwritten", "of entries that several ranks sent, only one counts"),
    ):
        if torch.allclose(found, value, atol=1e-5):
            raise Shortcoming(hint, "the mean of what the ranks send", words, where=_TOP_K)
    place = int((found - right).abs().argmax())
    raise Shortcoming(
        "wrong-values",
        f"entry {place} is {right[place]:.4f}: {[round(float(s[place]), 4) for s in sent]} were"
        f" sent by ranks 0 to {_NUM_RANKS - 1}",
        f"{found[place]:.4f}",
        where=f"{_TOP_K}, step 1",
    )


def _judge_matrix(found: torch.Tensor) -> None:
    mean = _mean(_POWER, 1)
    rank = int(torch.linalg.matrix_rank(found, rtol=1e-4))
    if rank > _RANK:
        raise Shortcoming(
            "rank-too-high", f"a matrix of rank {_RANK}", f"of rank {rank}", where=_POWER
        )
    if _is_projection(found, mean):
        return
    hint = "not-divided" if _is_projection(found / _NUM_RANKS, mean) else "not-a-projection"
    raise Shortcoming(
        hint,
        "the result is P·Pᵀ·M for orthonormal P: it is orthogonal to what it lacks of M",
        f"they are not: the result has norm {found.norm():.3f}, M has {mean.norm():.3f}, and what"
        f" is left {(mean - found).norm():.3f}",
        where=f"{_POWER}, step 1",
    )


def _is_projection(found: torch.Tensor, whole: torch.Tensor) -> bool:
    return bool((found.T @ (whole - found)).norm() < 1e-3 * whole.norm() ** 2) and bool(
        found.norm() > 0.1 * whole.norm()
    )


def _judge_sum(outcome: Outcome, name: str) -> None:
    found = _found(outcome, name)
    due = torch.stack([_mean(name, step) for step in range(1, _NUM_GRADIENTS + 1)]).sum(0)
    arrived = torch.stack(found).sum(0)
    off = float((arrived - due).norm() / due.norm())
    if off < 0.02:
        return
    after = [float(each.norm()) for each in found[_NUM_GRADIENTS:]]
    if max(after) < 1e-6:
        hint, words = "no-feedback", "in the steps with zeros, nothing more arrived"
    elif after[-1] > 0.1 * after[0] or not off < 10:
        hint, words = "counted-twice", f"after {_NUM_ZEROS} steps with zeros, more still arrives"
    else:
        hint, words = "lost", f"{off:.0%} of the sum are missing or too much"
    raise Shortcoming(
        hint,
        f"{_NUM_GRADIENTS} gradients, then {_NUM_ZEROS} steps with zeros: the results add up to"
        " the gradients, since what is not sent is sent later",
        words,
        where=name,
    )
