"""Exercise measure: the latency and bandwidth of a link.

Guidelines: guidelines.md, part 7. Check: drivetrain learn check measure
"""

import torch  # noqa: F401
import torch.distributed as dist  # noqa: F401


def measure(sizes: list[int]) -> dict[int, float]:
    """Return the seconds that one message of each size (in bytes) takes from rank 0 to rank 1.

    Called on both of two ranks; the check uses what rank 0 returns.
    """
    # TODO 1: ping-pong, several times per size.
    raise NotImplementedError("TODO 1 of measure")


def fit_line(sizes: list[int], seconds: list[float]) -> tuple[float, float]:
    """Return latency (s) and bandwidth (bytes per s) of seconds = latency + size / bandwidth.

    One of the points may be an outlier.
    """
    # TODO 2: the line.
    raise NotImplementedError("TODO 2 of fit_line")
