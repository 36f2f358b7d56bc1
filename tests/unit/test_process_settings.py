"""Flags can be set on a build without CUDA; what they do there was not run."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from drivetrain import ConfigError
from drivetrain.config.load import resolve
from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import EnvironmentProblem
from drivetrain.train.numerics.bitwise_mode import process_settings, settle_workspace

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def config(**changes: Any) -> RunConfig:
    base = {"global_batch_size": 4, "micro_batch_size": 2, "max_steps": 1}
    return resolve({**base, **changes}).config


def bitwise(**changes: Any) -> RunConfig:
    return config(reproducibility="bitwise", **changes)


def flags() -> dict[str, Any]:
    cudnn = torch.backends.cudnn
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn.benchmark": cudnn.benchmark,
        "cudnn.deterministic": cudnn.deterministic,
        "products": torch.get_float32_matmul_precision(),
        "convolutions": cudnn.allow_tf32,
    }


@pytest.fixture(autouse=True)
def _no_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":4096:8")
    monkeypatch.delenv(WORKSPACE)  # restored, whatever a test leaves behind


@pytest.mark.parametrize("benchmark", [True, False])
def test_bitwise_pins_all_flags_and_puts_them_back(
    monkeypatch: pytest.MonkeyPatch, *, benchmark: bool
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    before = flags()
    with process_settings(bitwise()):
        assert flags() == {
            "threads": 1,
            "deterministic": True,
            "cudnn.benchmark": False,
            "cudnn.deterministic": True,
            "products": "highest",
            "convolutions": False,
        }
    assert flags() == before


@pytest.mark.parametrize(
    ("tf32", "products", "convolutions"),
    [(None, "highest", True), (True, "high", True), (False, "highest", False)],
)
def test_tf32_is_a_switch(tf32: bool | None, products: str, convolutions: bool) -> None:
    before = flags()
    with process_settings(config(precision={"tf32": tf32})):
        assert (flags()["products"], flags()["convolutions"]) == (products, convolutions)
        if tf32 is not None:  # the new interface agrees
            expected = {"tf32"} if tf32 else {"none", "ieee"}
            assert torch.backends.cuda.matmul.fp32_precision in expected
            cudnn: Any = torch.backends.cudnn
            assert cudnn.conv.fp32_precision in expected
    assert flags() == before


def test_bitwise_keeps_tf32_where_it_is_asked_for() -> None:
    with process_settings(bitwise(precision={"tf32": True})):
        assert (flags()["products"], flags()["convolutions"]) == ("high", True)


def run(script: str) -> str:
    """In a process of its own: torch's new interface cannot be undone."""
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def test_a_script_that_uses_torchs_new_interface_gets_its_settings_back() -> None:
    script = """
import torch
from drivetrain.train.numerics.tf32 import tf32
torch.backends.cuda.matmul.fp32_precision = "tf32"
torch.backends.cudnn.conv.fp32_precision = "ieee"
with tf32(False):
    assert torch.get_float32_matmul_precision() == "highest"  # as torch.compile reads it
    assert torch.backends.cudnn.allow_tf32 is False
print(torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision)
"""
    assert run(script) == "tf32 ieee\n"


def test_a_setting_for_all_backends_that_says_otherwise_is_refused() -> None:
    script = """
import torch
from drivetrain.core.errors import EnvironmentProblem
from drivetrain.train.numerics.tf32 import tf32
torch.backends.fp32_precision = "tf32"
try:
    with tf32(False):
        print("trained")
except EnvironmentProblem as error:
    print(error)
"""
    assert "torch.backends.fp32_precision is 'tf32' in this process" in run(script)


def test_the_workspace_is_set_while_it_is_early_enough_and_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import os

    settle_workspace(has_begun=False)
    assert os.environ[WORKSPACE] == ":4096:8"
    settle_workspace(has_begun=True)  # a second run in the same process
    monkeypatch.setenv(WORKSPACE, ":16:8")
    settle_workspace(has_begun=True)
    assert os.environ[WORKSPACE] == ":16:8"


def test_a_workspace_that_comes_too_late_is_refused() -> None:
    with pytest.raises(EnvironmentProblem, match="CUDA was used before"):
        settle_workspace(has_begun=True)


@pytest.mark.parametrize("has_begun", [True, False])
def test_another_workspace_is_refused(monkeypatch: pytest.MonkeyPatch, *, has_begun: bool) -> None:
    monkeypatch.setenv(WORKSPACE, ":0:0")
    with pytest.raises(EnvironmentProblem, match=f"{WORKSPACE} = ':0:0'|{WORKSPACE} = :0:0"):
        settle_workspace(has_begun=has_begun)


def test_autotuning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="chosen by timing"):
        bitwise(compile={"enabled": True, "mode": "max-autotune-no-cudagraphs"})
    compiled = bitwise(compile={"enabled": True, "mode": "reduce-overhead"})
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    with pytest.raises(EnvironmentProblem, match="chosen by timing"), process_settings(compiled):
        pass
    with process_settings(bitwise()):  # nothing is compiled
        pass
