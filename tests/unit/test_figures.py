"""`make figures` knows every folder of results, and the code each speaks of."""

from __future__ import annotations

import re

from benchmarks.figures import ROOT, code_of, lines_changed, read_list


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
