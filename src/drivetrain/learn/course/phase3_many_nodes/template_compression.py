"""Exercise compression: send a part of the gradient, and the rest later.

Guidelines: guidelines.md, part 6. Check: drivetrain learn check compression
"""

import torch
import torch.distributed as dist  # noqa: F401


class TopK:
    """Every rank sends only its largest entries, and adds the rest to its next gradient."""

    def __init__(self, share: float) -> None:
        """Send round(share · m) entries of a gradient with m entries."""
        # TODO 1: the state to keep from step to step.
        raise NotImplementedError("TODO 1 of TopK")

    def all_reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the mean over all ranks of what each sends; the same on every rank.

        `gradient` has one dimension and always the same length; do not change it. A rank sends an
        entry as a value and an index: dist.all_gather_into_tensor(all_of_them, own).
        """
        # TODO 2: gradient + what was left over; its largest entries by absolute value.
        # TODO 3: keep the rest; exchange; add up.
        raise NotImplementedError("TODO 2 and 3 of TopK")


class PowerSGD:
    """Sends a matrix as two thin ones, whose product approximates it."""

    def __init__(self, rank: int) -> None:
        """`rank` is the number of columns of the thin matrices (not a process's rank)."""
        # TODO 4: the state to keep from step to step.
        raise NotImplementedError("TODO 4 of PowerSGD")

    def all_reduce(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return a matrix of rank `rank` near the mean over all ranks; the same on every rank.

        With M = matrix + what was left over, and Q of shape (columns, rank), the same on all ranks:
        P = mean of M·Q, made orthonormal (torch.linalg.qr); Q = mean of Mᵀ·P; the result is P·Qᵀ.
        """
        # TODO 5: the two all-reduces; keep what the result lacks.
        raise NotImplementedError("TODO 5 of PowerSGD")
