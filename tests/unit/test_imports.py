"""Importing without the garbage collector."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from drivetrain.core.imports import without_collector

COUNTED = """
import gc, sys
runs = []
gc.callbacks.append(lambda phase, info: runs.append(info["generation"]))
import drivetrain
drivetrain.Trainer
assert "torch" in sys.modules and gc.isenabled()
print(sum(generation == 2 for generation in runs))
"""


def test_no_full_collection_while_a_public_name_is_loaded() -> None:
    command = [sys.executable, "-c", COUNTED]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.strip() == "0"


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_left_as_it_was(was_on: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        with pytest.raises(ImportError), without_collector():
            assert not gc.isenabled()
            raise ImportError("a module that fails")
        assert gc.isenabled() is was_on
    finally:
        (gc.enable if before else gc.disable)()
