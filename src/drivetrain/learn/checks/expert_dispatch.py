"""Expert dispatch: no token is dropped, swapped or computed by the wrong expert.

A token's first number identifies it; an expert writes its own number into the second, and counts in
the third how often the token was computed.
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
_WIDTH = 16
_CASES = {
    "equally many tokens for every expert": ([0, 1, 2], [0, 1, 2], [2, 0, 1]),
    "in any order": ([2, 0, 0, 1, 2, 0], [1, 1, 0], [0, 2, 2, 1, 0]),
    "all tokens for expert 1": ([1, 1], [1, 1, 1], [1]),
    "a rank without tokens": ([0, 2, 1, 2], [], [2, 0]),
}
"""By case and rank: the experts of its tokens."""
_LARGE = "many tokens"
_NUM_LARGE = 240


def check(file: Path) -> Passed:
    outcome = run_on_ranks(file, _dispatch_all, _NUM_RANKS)
    for case in (*_CASES, _LARGE):
        for rank in range(_NUM_RANKS):
            _judge_rows(outcome, case, rank)
    sent, least = _judge_bytes(outcome)
    return Passed(
        [
            f"{len(_CASES) + 1} cases on {_NUM_RANKS} ranks: every token was computed once, by its"
            " own expert, and is back in its place",
            "even when all tokens go to one expert, and when a rank has none",
        ],
        [Score("bytes a rank sends", sent, least, "2 × its tokens for other ranks")],
        outcome.flow(_LARGE).picture(),
    )


def _experts_of(case: str, rank: int) -> torch.Tensor:
    if case != _LARGE:
        return torch.tensor(_CASES[case][rank], dtype=torch.long)
    generator = torch.Generator().manual_seed(rank)
    uneven = torch.tensor([0.6, 0.3, 0.1])
    return torch.multinomial(uneven, _NUM_LARGE, replacement=True, generator=generator)


def _tokens(case: str, rank: int) -> torch.Tensor:
    tokens = torch.zeros(len(_experts_of(case, rank)), _WIDTH)
    tokens[:, 0] = 1000 * (rank + 1) + torch.arange(len(tokens))
    return tokens


def _expert(rows: torch.Tensor) -> torch.Tensor:
    computed = rows.clone()
    computed[:, 1] = dist.get_rank() + 1
    computed[:, 2] += 1
    return computed


def _dispatch_all(module: Any, recorder: Any) -> dict[str, Any]:
    rank = dist.get_rank()
    results = {}
    for case in (*_CASES, _LARGE):
        recorder.section(case)
        found = module.dispatch(_tokens(case, rank), _experts_of(case, rank), _expert)
        results[case] = found[:, :3].tolist()
    return results


def _judge_rows(outcome: Outcome, case: str, rank: int) -> None:
    found = outcome.results[rank][case]
    tokens, experts = _tokens(case, rank), _experts_of(case, rank).tolist()
    hint, words = "", ""
    if len(found) != len(tokens):
        hint = "dropped" if len(found) < len(tokens) else "extra"
        words = f"{len(found)} rows for {len(tokens)} tokens"
    for row, (name, expert, times) in enumerate(found if not hint else ()):
        if name != float(tokens[row, 0]):
            hint, words = _misplaced(name, row, found, tokens)
        elif times == 0:
            hint, words = "not-computed", f"row {row} was computed by no expert"
        elif times > 1:
            hint, words = "computed-twice", f"row {row} was computed {times:g} times"
        elif expert != experts[row] + 1:
            hint = "wrong-expert"
            words = f"row {row} is for expert {experts[row]}, but expert {expert - 1:g} computed it"
        if hint:
            break
    if hint:
        raise Shortcoming(
            hint,
            f"row i of the result is tokens[i], computed once, by expert_of[i] = {experts[:8]}",
            f"rank {rank}: {words}",
            where=case,
            picture=outcome.flow(case).picture(),
        )


def _misplaced(
    name: float, row: int, found: list[list[float]], tokens: torch.Tensor
) -> tuple[str, str]:
    own = tokens[:, 0].tolist()
    if sorted(each[0] for each in found) == sorted(own):
        return "swapped", f"row {row} has the result of token {own.index(name)}"
    owner = int(name) // 1000 - 1
    if name == int(name) and 0 <= owner < _NUM_RANKS and name not in own:
        return "others-token", f"row {row} has a token of rank {owner}"
    return "dropped", f"token {row} is not in its row, which has {name:g}"


def _judge_bytes(outcome: Outcome) -> tuple[float, float]:
    flow = outcome.flow(_LARGE)
    sent = flow.sent()
    row = 4 * _WIDTH
    least = []
    for rank in range(_NUM_RANKS):
        there = int((_experts_of(_LARGE, rank) != rank).sum())
        back = sum(
            int((_experts_of(_LARGE, r) == rank).sum()) for r in range(_NUM_RANKS) if r != rank
        )
        least.append(row * (there + back))
    worst = max(range(_NUM_RANKS), key=lambda rank: sent[rank] / least[rank])
    if sent[worst] > 1.1 * least[worst]:
        raise Shortcoming(
            "too-many-bytes",
            f"rank {worst} sends its tokens for other ranks, and the results of their tokens:"
            f" {readable_bytes(least[worst])}",
            f"{readable_bytes(sent[worst])}, {sent[worst] / least[worst]:.2g} times as much",
            where=_LARGE,
            picture=flow.picture(),
        )
    return sent[worst], least[worst]
