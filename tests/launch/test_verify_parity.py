"""`drivetrain verify parity` on a script, as a user would type it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "tests" / "parity" / "workload.py")


def verify(tmp_path: Path, *words: str, hooks: str = "") -> tuple[int, str]:
    paths = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    result = subprocess.run(
        [sys.executable, "-m", "drivetrain", "verify", "parity", *words],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths, "DRIVETRAIN_HOOKS": hooks},
        check=False,
    )
    return result.returncode, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.long
def test_a_script_is_certified(tmp_path: Path) -> None:
    code, output = verify(tmp_path, SCRIPT, "--layouts", "ddp:2,fsdp:2", "--steps", "6")
    assert code == 0, output
    assert output.count("same training") == 2
    assert "losses 1e-04, gradient norms 1e-03" in output
    assert output.rstrip().endswith("certified")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.long
def test_settings_that_do_not_fit_a_short_run_on_one_process_give_way(tmp_path: Path) -> None:
    saving = ("checkpoint.keep_best=accuracy", "optimization.warmup_steps=50")
    own = (*saving, "micro_batch_size=16", "parallel.strategy=fsdp", "parallel.dp_shard=2")
    script = str(ROOT / "tests" / "parity" / "auto_size.py")
    code, output = verify(tmp_path, script, "total", *own, "--layouts", "ddp:2", "--steps", "3")
    assert code == 0, output
    assert "checkpoint.keep_best = null, instead of accuracy: this check saves nothing" in output
    assert "optimization.warmup_steps = 3, instead of 50: this check has 3 steps" in output


@pytest.mark.slow
def test_of_an_own_loop_it_says_what_was_not_compared(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "keep_your_loop.py")
    code, output = verify(tmp_path, script, "--layouts", "ddp:2", "--steps", "3")
    assert code == 0, output
    assert "own loop, which is not traced: losses and gradient norms are compared" in output
    assert "every parameter's gradient" not in output


@pytest.mark.slow
@pytest.mark.long
def test_a_bug_is_named_in_the_output(tmp_path: Path) -> None:
    words = (SCRIPT, "--layouts", "ddp:2", "--steps", "6", "--json")
    hooks = "tests.parity.mutants:OneParameterNotReduced"
    code, output = verify(tmp_path, *words, hooks=hooks)
    assert code == 1, output
    certificate: dict[str, Any] = json.loads(output)
    (result,) = certificate["results"]
    assert not certificate["holds"]
    divergence = result["divergence"]
    assert divergence["stage"] == "backward"
    assert divergence["place"] == "blocks.1.norm2.weight"
    assert divergence["step"] == 1


@pytest.mark.slow
@pytest.mark.long
def test_a_script_that_parts_from_itself_is_certified_as_far_as_it_can_tell(tmp_path: Path) -> None:
    script = str(ROOT / "tests" / "parity" / "chaotic.py")
    code, output = verify(tmp_path, script, "--layouts", "ddp:2", "--steps", "20")
    assert code == 0, output
    assert "same training to step " in output
    assert "one process diverges from itself by " in output


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("mode", "verdict"), [("standard", "itself by"), ("bitwise", "0.0e+00")])
def test_under_bitwise_a_rounding_difference_is_gone(
    tmp_path: Path, mode: str, verdict: str
) -> None:
    script = str(ROOT / "tests" / "parity" / "chaotic.py")
    words = (script, f"reproducibility={mode}", "--layouts", "ddp:2", "--steps", "20")
    code, output = verify(tmp_path, *words)
    assert code == 0, output
    assert verdict in output


@pytest.mark.slow
@pytest.mark.long
def test_a_layout_that_cannot_be_run_fails_with_its_own_words(tmp_path: Path) -> None:
    layouts = "parallel.strategy=nonsense@2"
    code, output = verify(tmp_path, SCRIPT, "--layouts", layouts, "--steps", "3")
    assert code == 1
    assert "could not be run" in output
    assert "parallel.strategy = nonsense" in output


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("loss", "why"),
    [("sum", "the loss is a sum over the samples"), ("weight", "Total(sum, count)")],
)
def test_a_script_on_auto_whose_loss_depends_on_the_size_is_not_certified(
    tmp_path: Path, loss: str, why: str
) -> None:
    words = (str(ROOT / "tests" / "parity" / "auto_size.py"), loss)
    code, output = verify(tmp_path, *words, "--layouts", "ddp:2", "--steps", "4")
    assert code == 1, output
    assert "same training" in output
    assert "certified only with micro_batch_size=16" in output
    assert "in micro-batches of 16, and" in output
    assert why in output
    fixed = (*words, "micro_batch_size=16")
    code, output = verify(tmp_path, *fixed, "--layouts", "ddp:2", "--steps", "4", "--json")
    assert code == 0, output
    certificate = json.loads(output)
    assert certificate["holds"]
    assert certificate["layouts_hold"]
    assert certificate["depends_on_size"] is None


@pytest.mark.slow
@pytest.mark.long
def test_a_script_on_auto_whose_loss_does_not_depend_on_the_size_is_certified(
    tmp_path: Path,
) -> None:
    words = (str(ROOT / "tests" / "parity" / "auto_size.py"), "total")
    code, output = verify(tmp_path, *words, "--layouts", "ddp:2", "--steps", "4")
    assert code == 0, output
    assert "micro_batch_size is auto; fixed at 16 for every layout" in output
    assert output.rstrip().endswith("\n  certified")


def test_a_layout_with_a_typing_error_is_refused_at_once(tmp_path: Path) -> None:
    code, output = verify(tmp_path, SCRIPT, "--layouts", "dpp:2")
    assert code == 2
    assert "--layouts = dpp:2: is not a layout; use one of ddp, bitwise, fsdp" in output
