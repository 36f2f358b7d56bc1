"""What `reproducibility: bitwise` asks of the process: one thread, deterministic operators."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def same_bits(*, enabled: bool) -> Iterator[None]:
    """Pin what else could change bits between world sizes, and put it back afterwards."""
    if not enabled:
        yield
        return
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # A matrix product's order of additions depends on how many threads share it.
    torch.set_num_threads(1)
    # cuBLAS only reads this before its first use; it is ignored on the CPU.
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        if workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
