"""`bench scaling` on real ranks: an engine that trains something else is named, ours is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.scaling.request import BARE, OURS, ScalingRequest

# DDP without its exchange: every rank trains on its own samples alone
PLANTED = """
from drivetrain.scaling import bare, bench
bare.BARE_ENGINES["ddp"] = lambda model: model
bench.main()
"""


@pytest.mark.slow
@pytest.mark.long
def test_an_engine_that_trains_something_else_is_found_out(tmp_path: Path) -> None:
    script, found = tmp_path / "planted.py", tmp_path / "found.json"
    script.write_text(PLANTED)
    asked = ScalingRequest(
        ("ddp", "fsdp"),
        steps_per_block=2,
        rounds=2,
        passes=1,
        modes=("weak",),
        emulate_compute_ms=4.0,
        json_file=str(found),
    )
    command = [sys.executable, "-m", "drivetrain", "train", "--nproc-per-node", "2"]
    command += ["--max-restarts", "0", str(script), asked.to_json()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    words = "losses differ from those of one process on the same samples: bare DDP on 2 (weak)"
    assert words in done.stdout
    lines = json.loads(found.read_text())["lines"]
    assert {each["num_ranks"] for each in lines} == {1, 2}
    for each in lines:
        is_planted = each["strategy"] == "ddp" and each["arm"] != OURS and each["num_ranks"] == 2
        assert (each["loss_difference"] > 1e-5) == is_planted, each
        assert (each["predicted_s"] is None) == (each["num_ranks"] == 1)
        assert each["step_s"] >= 0.004
    at_once = {(each["mode"], each["arm"]): each for each in lines if each["num_ranks"] == 1}
    assert at_once["weak", BARE]["speedup"]["value"] == 1
