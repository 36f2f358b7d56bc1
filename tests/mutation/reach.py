"""Which test runs which line, and how long each takes: python -m tests.mutation.reach GROUP FILE

Run inside a copy of the project. Processes that a test starts are seen too, unless they are killed.
"""

from __future__ import annotations

import json
import os
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import coverage
import pytest

from tests.mutation.scope import GROUPS, Group

TEST = "REACH_TEST"
_PATIENCE_S = 20.0


class _Reach:
    """A pytest plugin: lines by test, seconds by test."""

    def __init__(self, files: list[str]) -> None:
        self._coverage = coverage.Coverage(".reach", data_suffix=True, config_file=_settings(files))
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []

    def pytest_sessionstart(self) -> None:
        self._coverage.start()
        _count_ranks()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._coverage.switch_context(nodeid)
        # what the test starts begins with this
        self._coverage.set_option("run:context", nodeid)
        os.environ["COVERAGE_PROCESS_CONFIG"] = self._coverage.config.serialize()
        os.environ[TEST] = nodeid

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def lines(self, file: str) -> dict[int, list[str]]:
        """By line, the tests that ran it."""
        contexts = self._coverage.get_data().contexts_by_lineno(str(Path(file).absolute()))
        # a process that forks inside a test has both contexts: the same one, joined
        named = {line: {c.rpartition("|")[2] for c in tests} for line, tests in contexts.items()}
        return {line: sorted(filter(None, tests)) for line, tests in named.items()}

    def stop(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        self._coverage.combine()


def _count_ranks() -> None:
    """A rank's lines are its test's; and one that is ended while it writes them breaks the file."""
    from drivetrain.testing import ranks  # not before its lines are counted

    end_child = ranks.end_child  # type: ignore[attr-defined]

    def end_patiently(process: BaseProcess) -> None:
        process.join(_PATIENCE_S)
        end_child(process)

    ranks.end_child = end_patiently  # type: ignore[attr-defined]
    ranks._IMPORTED_ONCE += ("tests.mutation.rank_context",)  # type: ignore[assignment]


def _settings(files: list[str]) -> str:
    path = Path("reach.ini")
    named = "\n  ".join(str(Path(file).absolute()) for file in files)
    path.write_text(
        f"[run]\nparallel = true\npatch = subprocess, _exit, fork\ninclude =\n  {named}\n"
    )
    return str(path)


def main(group: Group, output: Path) -> int:
    files = [*group.files(Path.cwd()), *group.planted_in]
    reach = _Reach(files)
    options = ["-p", "no:cacheprovider", "-m", "not slow and not long", "--hypothesis-profile=ci"]
    pytest.main([*options, *group.options, *group.tests], plugins=[reach])
    reach.stop()
    # a test that fails without a mutant says nothing about one
    seconds = {test: s for test, s in reach.seconds.items() if test not in reach.failed}
    lines = {file: reach.lines(file) for file in files}
    output.write_text(json.dumps({"seconds": seconds, "failed": reach.failed, "lines": lines}))
    return 0


if __name__ == "__main__":
    sys.exit(main(GROUPS[sys.argv[1]], Path(sys.argv[2])))
