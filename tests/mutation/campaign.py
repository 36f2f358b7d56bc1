"""Mutation testing: python -m tests.mutation.campaign FOLDER [--sample N|all] [--again] [--group G]

A sample has a part of every file's mutants, in proportion, chosen by `--seed`. `--again` keeps what
was killed and tries the others once more: for when tests were added and nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import random
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from tests.mutation.mutants import Mutant, Mutants
from tests.mutation.planted import planted
from tests.mutation.scope import GROUPS
from tests.mutation.table import Row, write_tables

_WORKERS = 2
_TESTS_S, _QUICK_S = 60.0, 0.5
"""Seconds of tests per mutant: the quick ones, then of each file in turn. They may take longer:"""
_TIMES_LONGER, _AT_LEAST_S = 5.0, 180.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sample", default="1000")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--group", choices=GROUPS, action="append")
    parser.add_argument("--seed", type=int, default=20)
    asked = parser.parse_args()
    for name in asked.group or list(GROUPS):
        _try_group(name, asked.folder / name, asked.sample, asked.seed, again=asked.again)
    return 0


def _try_group(name: str, folder: Path, sample: str, seed: int, *, again: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = GROUPS[name].files(Path.cwd())
    everything = {file: Mutants(file, Path(file).read_text()) for file in files}
    counts = {file: len(mutants) for file, mutants in everything.items()}
    drawn = _sample(everything, sample, seed)
    known = _known(folder) if again else {}
    print(f"{name}: {len(drawn)} of {sum(counts.values())} mutants", flush=True)
    by_hand = [m for m in planted() if m.file in (*files, *GROUPS[name].planted_in)]
    random.Random(seed).shuffle(drawn)  # noqa: S311 - what is cut short is a sample too
    rows = _try_all(name, [*by_hand, *drawn], known, folder / "mutants.jsonl")
    write_tables(folder, rows, counts, seed)


def _sample(everything: dict[str, Mutants], size: str, seed: int) -> list[Mutant]:
    total = sum(map(len, everything.values()))
    share = 1.0 if size == "all" else min(1.0, int(size) / total)
    drawn = []
    for file, mutants in everything.items():
        chance = random.Random(f"{seed} {file}")  # noqa: S311 - no secret
        numbers = chance.sample(range(len(mutants)), math.ceil(share * len(mutants)))
        drawn += [mutants[number] for number in sorted(numbers)]
    return drawn


def _copy(folder: Path) -> Path:
    """The project as it is, for one worker to change; times are kept, so compiled files count."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("src", "tests", "docs", "examples"):
        shutil.copytree(name, folder / name)
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "Makefile"):
        shutil.copy2(name, folder / name)
    return folder.absolute()


def _environment(copy: Path) -> dict[str, str]:
    # a forked child waits forever for the OpenMP threads that its parent had
    return {**os.environ, "PYTHONPATH": f"{copy / 'src'}:{copy}", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Reach:
    """What tests/mutation/reach.py found."""

    seconds: dict[str, float]
    lines: dict[str, dict[str, list[str]]]

    def tests(self, mutant: Mutant) -> list[str]:
        """Some that run the statement; what runs on import has all of a test file."""
        by_line = self.lines[mutant.file]
        wanted = range(mutant.lines[0], mutant.lines[1] + 1)
        found = {test for line in wanted for test in by_line.get(str(line), [])}
        if not mutant.function:
            # a default value is used by generated code, which has no line of the file
            touching = {t.partition("::")[0] for tests in by_line.values() for t in tests}
            # and a file of nothing but definitions is reached by no line at all
            touching = touching or {test.partition("::")[0] for test in self.seconds}
            found = {test for test in self.seconds if test.partition("::")[0] in touching}
        total_s = 0.0
        chosen: list[str] = []
        for test in self._in_turn(found & self.seconds.keys()):
            total_s += self.seconds[test]
            if total_s > _TESTS_S and chosen:
                break
            chosen.append(test)
        return chosen

    def _in_turn(self, tests: set[str]) -> list[str]:
        """The quick ones, then of every test file its next: files look at other things."""
        quickest = sorted(tests, key=lambda test: (self.seconds[test], test))
        num_quick = sum(self.seconds[test] < _QUICK_S for test in tests)
        quick, quickest = quickest[:num_quick], quickest[num_quick:]
        place: Counter[str] = Counter()
        turns = []
        for test in quickest:
            file = test.partition("::")[0]
            place[file] += 1
            turns.append(place[file])
        rest = [test for _, test in sorted(zip(turns, quickest, strict=True), key=itemgetter(0))]
        return [*quick, *rest]


def _reach(group: str, copy: Path) -> Reach:
    output = copy.parent / f"{group}.json"
    command = [sys.executable, "-m", "tests.mutation.reach", group, str(output)]
    with (copy.parent / f"{group}.log").open("w") as log:
        subprocess.run(
            command, cwd=copy, env=_environment(copy), stdout=log, stderr=log, check=True
        )
    read = json.loads(output.read_text())
    for test in read["failed"]:
        print(f"fails without a mutant, and is left out: {test}")
    return Reach(read["seconds"], read["lines"])


class _Worker:
    """A process of tests/mutation/worker.py."""

    def __init__(self, group: str, copy: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutation.worker", group],
            cwd=copy,
            env=_environment(copy),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _try_all(group: str, mutants: Sequence[Mutant], known: dict[str, Row], log: Path) -> list[Row]:
    copies = [_copy(Path("build/mutation") / f"copy-{number}") for number in range(_WORKERS)]
    reach = _reach(group, copies[0])
    workers: queue.Queue[_Worker] = queue.Queue()
    for copy in copies:
        workers.put(_Worker(group, copy))
    lock = threading.Lock()
    with log.open("w") as file, ThreadPoolExecutor(_WORKERS) as pool:

        def attempt(mutant: Mutant) -> Row:
            row = known.get(mutant.name)
            if row is None or not row.is_killed:
                worker = workers.get()
                row = _try(mutant, worker, reach)
                workers.put(worker)
            with lock:
                file.write(row.to_json() + "\n")
                file.flush()
            return row

        rows = list(pool.map(attempt, mutants))
    for _ in range(_WORKERS):
        workers.get().close()
    return rows


def _try(mutant: Mutant, worker: _Worker, reach: Reach) -> Row:
    tests = reach.tests(mutant)
    if not tests:
        return Row.of(mutant, "not run", "", 0.0)
    expected_s = sum(reach.seconds[test] for test in tests)
    answer = worker.ask(
        {
            "file": mutant.file,
            "text": mutant.text,
            "function": mutant.function,
            "tests": tests,
            "limit_s": _AT_LEAST_S + _TIMES_LONGER * expected_s,
        }
    )
    return Row.of(mutant, answer["status"], answer["by"], answer["seconds"])


def _known(folder: Path) -> dict[str, Row]:
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return {row.name: row for row in map(Row.from_json, lines)}


if __name__ == "__main__":
    sys.exit(main())
