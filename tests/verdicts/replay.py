"""Slow ranks planted into recorded clean runs: python -m tests.verdicts.replay FOLDER

FOLDER/clean-steps.jsonl has the steps of the campaign's clean runs, so the noise is real: that of
the machine they ran on. Into each one a rank is made slower from a step on, and the detector is
asked after every further step, as somebody would who watches. Writes FOLDER/stragglers.md.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from drivetrain.diagnose import straggler
from drivetrain.diagnose.straggler import Array

_EXCESSES = (0.1, 0.2, 0.5)
_FIRST_ASKED = 20
"""Steps without which nothing is judged."""


@dataclass(frozen=True)
class Recording:
    """Of one clean run: [ranks × steps], and the steps' time."""

    own_s: Array
    lap_s: Array

    def with_slow_rank(self, rank: int, step: int, excess: float) -> Recording:
        """Everybody waits for the last."""
        own_s = self.own_s.copy()
        own_s[rank, step:] *= 1 + excess
        return Recording(own_s, self.lap_s + own_s.max(axis=0) - self.own_s.max(axis=0))

    def named_after(self, num_steps: int) -> int | None:
        """Who is named when so many steps are done."""
        own_s, lap_s = self.own_s[:, :num_steps], self.lap_s[None, :num_steps]
        steps = np.arange(1.0, num_steps + 1)
        lags = straggler.find_lags(own_s, np.zeros_like(own_s), lap_s, steps)
        return lags[0].rank if lags else None


@dataclass(frozen=True)
class Replay:
    """What came of one."""

    rank: int | None
    """Who was made slow; None for nobody."""
    named: int | None
    """At the end."""
    named_before: bool
    """Somebody was named who was not slow, or not yet."""
    shown_after: int | None
    """Steps until a window showed the rank slow."""
    named_after: int | None
    """Steps until it was a finding, to stay one."""


def replay(recording: Recording, excess: float, seed: int) -> Replay:
    chance = random.Random(f"{excess}-{seed}")  # noqa: S311 - repeatable is what it must be
    rank: int | None = chance.randrange(len(recording.own_s)) if excess else None
    num_steps = recording.own_s.shape[1]
    step = chance.randint(num_steps // 5, num_steps // 2) if excess else num_steps
    if rank is not None:
        recording = recording.with_slow_rank(rank, step, excess)
    asked = range(_FIRST_ASKED, num_steps + 1)
    answers = [(number, recording.named_after(number)) for number in asked]
    false = [who is not None and (who != rank or done <= step) for done, who in answers]
    last_not = max((done for done, who in answers if who != rank), default=step)
    at_the_end = answers[-1][1]
    return Replay(
        rank,
        at_the_end,
        any(false),
        _shown_after(recording, rank, step),
        last_not + 1 - step if rank is not None and at_the_end == rank else None,
    )


def _shown_after(recording: Recording, rank: int | None, step: int) -> int | None:
    if rank is None:
        return None
    ends = np.flatnonzero(straggler.slow_windows(recording.own_s)[rank]) + straggler.WINDOW
    later = ends[ends > step]
    return int(later[0]) - step if len(later) else None


def table(by_excess: Mapping[float, Sequence[Replay]]) -> str:
    lines = [
        "| planted into clean recordings | replays | named at the end | somebody else | "
        "steps until a window shows it, median | until it is a finding, median |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for excess, replays in by_excess.items():
        right = sum(each.named is not None and each.named == each.rank for each in replays)
        wrong = sum(each.named is not None and each.named != each.rank for each in replays)
        shown = [each.shown_after for each in replays if each.shown_after is not None]
        named = [each.named_after for each in replays if each.named_after is not None]
        what = f"a rank {excess:.0%} slower" if excess else "nothing"
        lines.append(
            f"| {what} | {len(replays)} | {right if excess else '–'} | {wrong} "
            f"| {_median(shown)} | {_median(named)} |"
        )
    every = [each for replays in by_excess.values() for each in replays]
    accused = [each for each in every if each.named is not None]
    slow = [each for each in every if each.rank is not None]
    true = [each for each in accused if each.named == each.rank]
    early = sum(each.named_before for each in every)
    lines.append(
        f"\nAt the end: precision {len(true) / max(1, len(accused)):.2f}, "
        f"recall {len(true) / max(1, len(slow)):.2f}. Asked after every step, somebody who was not "
        f"slow (yet) was named at some moment in {early} of {len(every)} replays."
    )
    return "\n".join(lines) + "\n"


def _median(values: Sequence[int]) -> str:
    return f"{median(values):.0f}" if values else "–"


def read_recordings(folder: Path) -> list[Recording]:
    rows = [json.loads(line) for line in (folder / "clean-steps.jsonl").read_text().splitlines()]
    return [Recording(np.array(row["own_ms"]) / 1e3, np.array(row["lap_ms"]) / 1e3) for row in rows]


def main() -> None:
    folder = Path(sys.argv[1])
    recordings = read_recordings(folder)
    by_excess = {
        excess: [replay(recording, excess, seed) for seed, recording in enumerate(recordings)]
        for excess in (0.0, *_EXCESSES)
    }
    (folder / "stragglers.md").write_text(table(by_excess))
    print(table(by_excess))


if __name__ == "__main__":
    main()
