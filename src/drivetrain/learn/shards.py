"""How parameters changed in a first sharded step, and which typical mistake explains it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drivetrain.learn.attempt import Shortcoming


@dataclass(frozen=True)
class Move:
    """The change of all parameters, concatenated, in the first step."""

    right: torch.Tensor
    found: list[torch.Tensor]
    """By rank."""
    alone: list[torch.Tensor]
    """By rank: the change from its own gradient alone."""
    part_of: int = 0
    """Number of parameters that are split together; 0 means all."""


def judge_move(move: Move, picture: str) -> None:
    """Raise Shortcoming unless all ranks changed all parameters as the mean gradient does."""
    differing = [
        rank for rank, each in enumerate(move.found) if not torch.equal(each, move.found[0])
    ]
    if differing:
        raise _ranks_differ(move, differing[0], picture)
    if _close(move.found[0], move.right):
        return
    hint, found = _explained(move)
    raise Shortcoming(
        hint,
        "step 1 changes every parameter as one process with the mean gradient would",
        found,
        where="step 1",
        picture=picture,
    )


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).norm() <= 1e-3 * b.norm())


def _num_moved(move: torch.Tensor) -> int:
    return int((move != 0).sum())


def _ranks_differ(move: Move, rank: int, picture: str) -> Shortcoming:
    moved = [_num_moved(each) for each in move.found]
    usual = _num_moved(move.right)
    is_part = max(moved) < 0.6 * usual
    return Shortcoming(
        "not-gathered" if is_part else "ranks-differ",
        f"after the step, all ranks have equal parameters, and all {len(move.right)} have changed",
        f"parameters that changed, by rank: {moved}"
        if is_part
        else f"the parameters of rank {rank} differ from those of rank 0",
        where="step 1",
        picture=picture,
    )


def _explained(move: Move) -> tuple[str, str]:
    found, right, num_ranks = move.found[0], move.right, len(move.found)
    if _close(found, right * num_ranks):
        return "not-divided", f"every parameter changed {num_ranks} times as much"
    if _close(found, right / num_ranks):
        return "divided-twice", f"every parameter changed 1/{num_ranks} as much"
    if _close(found, _by_owner(move)):
        return "own-gradient", "each part was stepped with the gradient of one rank alone"
    same = (found - right).abs() <= 1e-3 * right.abs() + 1e-9
    if _num_moved(found) < _num_moved(right) and bool(same[found != 0].all()):
        still = (right != 0) & (found == 0)
        return "rest", f"{int(still.sum())} parameters did not change: {_run(still)}"
    if torch.allclose(found.sort().values, right.sort().values, rtol=1e-3, atol=1e-6):
        return "wrong-part", "the right updates, of the wrong parameters"
    wrong = int((~same).sum())
    return "wrong-step", f"{wrong} of {len(right)} parameters changed differently: {_run(~same)}"


def _by_owner(move: Move) -> torch.Tensor:
    """Return the change if each part's owner used only its own gradient."""
    length = move.part_of or len(move.right)
    part = -(-length // len(move.alone))
    owner = torch.arange(len(move.right)) % length // part
    return torch.stack(move.alone).gather(0, owner[None])[0]


def _run(is_wrong: torch.Tensor) -> str:
    places = is_wrong.nonzero().flatten().tolist()
    return f"numbers {places[0]} to {places[-1]}" if len(places) > 1 else f"number {places[0]}"
