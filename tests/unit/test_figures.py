"""`make figures` knows every folder of results, and the code each speaks of."""

from __future__ import annotations

import re
import subprocess

import pytest

from benchmarks.figures import ROOT, code_of, has_history, lines_changed, newest, read_list


def test_every_folder_of_results_is_listed_with_code_and_target_that_exist() -> None:
    listed = read_list()
    assert set(listed) == {path.name for path in (ROOT / "benchmarks/results").iterdir()}
    makefile = (ROOT / "Makefile").read_text()
    for name, entry in listed.items():
        assert re.search(rf"^{entry['make']}:", makefile, re.MULTILINE), name
        for path in code_of(entry):
            assert (ROOT / path).exists(), (name, path)


def test_lines_added_and_removed_are_counted_and_pictures_are_not() -> None:
    assert lines_changed("3\t1\tsrc/a.py\n-\t-\tplot.png\n10\t0\tsrc/b.py\n") == 14


def test_the_later_of_two_measurements_counts() -> None:
    if not has_history():
        pytest.skip("not a clone with its history")
    command = ["git", "log", "-2", "--format=%h"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    later, earlier = found.split()
    assert newest(earlier, later)[0] == newest(later, earlier)[0] == later
    assert newest(earlier, None)[0] == earlier
