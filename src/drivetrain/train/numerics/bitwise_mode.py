"""Process-wide settings of a config: TF32, and those of `reproducibility: bitwise`.

The latter are one thread, deterministic operators, and no algorithms chosen by timing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import EnvironmentProblem, Problem
from drivetrain.train.numerics.tf32 import tf32

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC = (":4096:8", ":16:8")
_AUTOTUNE = "TORCHINDUCTOR_MAX_AUTOTUNE"


@contextmanager
def process_settings(config: RunConfig) -> Iterator[None]:
    """Context with the config's process-wide settings; restores them afterwards."""
    is_bitwise = config.reproducibility == "bitwise"
    allowed = config.precision.tf32
    # if left open, convolutions would use TF32 (torch's default), products the script's setting
    with tf32(bool(allowed) if is_bitwise else allowed):
        if not is_bitwise:
            yield
            return
        _refuse_autotuning(config)
        if torch.backends.cuda.is_built():
            settle_workspace(has_begun=torch.cuda.is_initialized())
        with _same_bits():
            yield


@contextmanager
def _same_bits() -> Iterator[None]:
    """Fix the other settings that could change bits between world sizes, attempts and runs."""
    cudnn = torch.backends.cudnn
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    flags = cudnn.benchmark, cudnn.deterministic
    # A matrix product's order of additions depends on how many threads share it.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    # benchmarking picks the fastest algorithm by timing, which differs between ranks
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = flags
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def settle_workspace(*, has_begun: bool) -> None:
    """Configure a cuBLAS workspace with which sums have a fixed order.

    cuBLAS reads the variable once, at its first use; with `has_begun`, CUDA is already in use, so
    it may be too late. The variable stays set: a second run in the process uses the same cuBLAS.
    """
    found = os.environ.get(_WORKSPACE)
    if found in _DETERMINISTIC:
        return
    if found is None and not has_begun:
        os.environ[_WORKSPACE] = _DETERMINISTIC[0]
        return
    rule = "reproducibility=bitwise needs a workspace of fixed size"
    if found is None:
        rule += ", and CUDA was used before the run could set it"
    remedy = f"start the script with {_WORKSPACE}={_DETERMINISTIC[0]}"
    problem = Problem(_WORKSPACE, rule, remedy, "not set" if found is None else found)
    raise EnvironmentProblem([problem])


def _refuse_autotuning(config: RunConfig) -> None:
    """Refuse autotuning by the environment; the config's rules refuse it in compile.mode."""
    if config.compile.enabled and os.environ.get(_AUTOTUNE) == "1":
        problem = Problem(
            _AUTOTUNE,
            "kernels chosen by timing differ from rank to rank, and so do their results",
            "unset it, or use reproducibility=standard",
            "1",
        )
        raise EnvironmentProblem([problem])
