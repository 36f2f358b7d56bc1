"""Checkpoints under kill -9: killed at any moment of a save, the newest complete step must load."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.learn.attempt import (
    Outcome,
    Shortcoming,
    in_this_process,
    load,
    run_on_ranks,
    run_until_killed,
)
from drivetrain.learn.moments import FileMoments
from drivetrain.learn.verdict import Passed

_NUM_RANKS = 2
_FIRST_STEP = 7
_MOST_KILLS = 13
_EXPECTED = "the newest completely saved step, with each rank's own shard"


def check(file: Path) -> Passed:
    with tempfile.TemporaryDirectory(prefix="drivetrain-learn-") as name:
        folder = Path(name).resolve()
        seen = run_on_ranks(file, _save, _NUM_RANKS, (name, _FIRST_STEP))
        in_this_process(file, _judge_empty)
        _judge_loaded(file, folder, _FIRST_STEP, _FIRST_STEP + 1, True, "no rank was killed")
        for _, written, steps in seen.results:
            _judge_synced(written, steps, folder)
        moments = _chosen([(rank, i) for rank, r in enumerate(seen.results) for i in range(r[0])])
        for number, (rank, moment) in enumerate(moments, 1):
            step = _FIRST_STEP + 2 * number
            args = (name, step, rank, moment)
            outcome = run_until_killed(file, _save, _NUM_RANKS, args)
            _judge_kill(file, folder, step, outcome, rank)
        run_on_ranks(file, _save, _NUM_RANKS, (name, step + 1))
        _judge_loaded(file, folder, step + 1, step + 2, True, "saved again after a kill")
    return Passed(
        [
            f"2 ranks killed at {len(moments)} moments of a save: each time the newest complete"
            " step was loaded, the same on both ranks",
            "leftover files did not disturb the next save, even of the same step",
            "data is synced to the disk before its name",
        ]
    )


def _judge_empty(module: ModuleType) -> None:
    with tempfile.TemporaryDirectory(prefix="drivetrain-learn-") as name:
        found = module.load_newest(Path(name), 0)
    if found is not None:
        raise Shortcoming("old-step", "None from an empty folder", repr(found)[:80])


def _chosen(moments: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return all moments, or _MOST_KILLS of them, evenly spaced."""
    if len(moments) <= _MOST_KILLS:
        return moments
    return [moments[i * len(moments) // _MOST_KILLS] for i in range(_MOST_KILLS)]


def _shard(step: int, rank: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1000,), float(100 * step + rank)), "step": torch.tensor(step)}


def _save(
    module: Any, recorder: Any, name: str, step: int, victim: int = -1, last: int = -1
) -> tuple[int, list[str], list[tuple[str, str, str]]]:
    """Save one step completely, and then the next, during which a rank may be killed."""
    rank = dist.get_rank()
    module.save(Path(name), step, _shard(step, rank))
    with recorder.paused():
        dist.barrier()
    moments = FileMoments(Path(name), last if rank == victim else None)
    moments.install()
    module.save(Path(name), step + 1, _shard(step + 1, rank))
    recorder.note(returned=True)
    moments.stop()
    return len(moments.names), moments.written, moments.steps


def _judge_kill(file: Path, folder: Path, step: int, outcome: Outcome, rank: int) -> None:
    has_returned = any(record.notes for record in outcome.records)
    _judge_loaded(file, folder, step, step + 1, has_returned, f"rank {rank} was killed")


def _judge_loaded(
    file: Path, folder: Path, before: int, after: int, has_returned: bool, where: str
) -> None:
    """Step `before` or `after` must load; `after` if its save had returned on any rank."""
    where = f"{where} while step {after} was saved"
    loaded = [_loaded(file, folder, rank, where) for rank in range(_NUM_RANKS)]
    steps = [None if each is None else int(each[0]) for each in loaded]
    shown = ", ".join(f"rank {r}: step {s}" for r, s in enumerate(steps))
    if len(set(steps)) > 1:
        raise Shortcoming("mixed-steps", _EXPECTED, shown, where=where)
    if steps[0] not in (before, after):
        expected = f"step {before} or {after}: {before} was complete"
        raise Shortcoming("old-step", expected, shown, where=where)
    if has_returned and steps[0] != after:
        expected = f"step {after}, since save() had returned on a rank"
        raise Shortcoming("returned-too-early", expected, shown, where=where)
    for rank, (step, shard) in enumerate(each for each in loaded if each is not None):
        right = _shard(int(step), rank)
        if not all(torch.equal(torch.as_tensor(shard[key]), right[key]) for key in right):
            found = f"rank {rank} got a different shard"
            raise Shortcoming("wrong-shard", _EXPECTED, found, where=where)


def _loaded(file: Path, folder: Path, rank: int, where: str) -> Any:
    try:
        return load(file).load_newest(folder, rank)
    except NotImplementedError:
        raise
    except FileNotFoundError as error:
        missing = Path(str(error.filename)).name
        found = f"rank {rank}: {missing} is missing in a step that was loaded as complete"
        raise Shortcoming("incomplete-step", _EXPECTED, found, where=where) from error
    except Exception as error:
        found = f"rank {rank}: load_newest raised {type(error).__name__}: {str(error)[:120]}"
        raise Shortcoming("torn-file", _EXPECTED, found, where=where) from error


def _judge_synced(written: list[str], steps: list[tuple[str, str, str]], folder: Path) -> None:
    """Require that each non-empty file was synced before it got its name."""
    for path in dict.fromkeys(written):
        renamed = [
            i for i, (what, source, _) in enumerate(steps) if (what, source) == ("rename", path)
        ]
        final = steps[renamed[-1]][2] if renamed else path
        if not Path(final).is_file() or not Path(final).stat().st_size:
            continue
        synced = [
            i for i, (what, source, _) in enumerate(steps) if (what, source) == ("sync", path)
        ]
        if not synced or (renamed and min(synced) > renamed[-1]):
            name = Path(path).relative_to(folder)
            when = " before it was renamed" if renamed else ""
            found = f"{name} was not synced{when}"
            raise Shortcoming(
                "no-fsync", "data is on the disk before the step counts as saved", found
            )
