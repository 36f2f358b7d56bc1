"""Latency and bandwidth of a link: ping-pong, and the line through it."""

import statistics
import time

import torch
import torch.distributed as dist


def measure(sizes: list[int], repeats: int = 7) -> dict[int, float]:
    """Return the seconds that one message of each size (in bytes) takes from rank 0 to rank 1."""
    seconds = {}
    for size in sizes:
        buffer = torch.zeros(size, dtype=torch.uint8)
        times = []
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            if dist.get_rank() == 0:
                dist.send(buffer, 1)
                dist.recv(buffer, 1)
            else:
                dist.recv(buffer, 0)
                dist.send(buffer, 0)
            times.append(time.perf_counter() - begin)
        # The first includes the connection setup. Half of a round trip is one message.
        seconds[size] = statistics.median(times[1:]) / 2
    return seconds


def fit_line(sizes: list[int], seconds: list[float]) -> tuple[float, float]:
    """Return latency (s) and bandwidth (bytes per s) of seconds = latency + size / bandwidth."""
    # Theil-Sen: the median of the slopes of all pairs. One bad point affects only its own pairs;
    # least squares would bend the whole line towards it.
    slopes = [
        (seconds[j] - seconds[i]) / (sizes[j] - sizes[i])
        for i in range(len(sizes))
        for j in range(i + 1, len(sizes))
    ]
    slope = statistics.median(slopes)
    latency = statistics.median(s - slope * size for size, s in zip(sizes, seconds, strict=True))
    return latency, 1 / slope
