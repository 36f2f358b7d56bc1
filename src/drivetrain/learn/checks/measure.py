"""Latency and bandwidth: a link whose speed the check knows, because it throttles the link."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from drivetrain.learn.attempt import Shortcoming, in_this_process, run_on_ranks
from drivetrain.learn.verdict import Passed

_LATENCY_S, _BYTES_PER_S = 5e-3, 40e6
_SIZES = (1_000, 50_000, 200_000, 800_000)
_ALLOWED = 0.25
"""Tolerance: processing and wake-up times add to the link's time."""


def check(file: Path) -> Passed:
    in_this_process(file, _judge_fit)
    seconds = _measured(file)
    latency_s, bytes_per_s = in_this_process(file, _fitting(seconds))
    plain = run_on_ranks(file, _measure, 2, (False,)).results[0]
    own_latency_s, own_rate = in_this_process(file, _fitting(plain))
    return Passed(
        [
            "the line through 5 exact points, and through 5 points with one outlier",
            f"a link of {_LATENCY_S * 1e3:g} ms and {_BYTES_PER_S / 1e6:g} MB/s: you measured"
            f" {latency_s * 1e3:.2f} ms and {bytes_per_s / 1e6:.1f} MB/s",
            _own_link(own_latency_s, own_rate),
        ]
    )


def _own_link(latency_s: float, bytes_per_s: float) -> str:
    begin = f"this machine's own link, not slowed down: {latency_s * 1e6:.0f} µs and"
    if not 0 < bytes_per_s < float("inf"):
        return f"{begin} no bandwidth: longer messages took no longer; is the machine busy?"
    return f"{begin} {bytes_per_s / 1e6:.0f} MB/s (not checked)"


def _measured(file: Path) -> dict[int, float]:
    """Try again: on a busy machine a correct one may be off; a wrong one is off each time."""
    for tries_left in (2, 1, 0):
        measured = run_on_ranks(file, _measure, 2, (True,))
        try:
            _judge_times(measured.results[0], measured)
        except Shortcoming:
            if tries_left == 0:
                raise
        else:
            break
    seconds: dict[int, float] = measured.results[0]
    return seconds


def _fitting(seconds: dict[int, float]) -> Callable[[ModuleType], tuple[float, float]]:
    sizes = sorted(seconds)

    def fit(module: ModuleType) -> tuple[float, float]:
        latency_s, bytes_per_s = module.fit_line(sizes, [seconds[size] for size in sizes])
        return float(latency_s), float(bytes_per_s)

    return fit


def _judge_fit(module: ModuleType) -> None:
    sizes = [1_000, 10_000, 100_000, 1_000_000, 4_000_000]
    exact = [2e-4 + size / 5e8 for size in sizes]
    for where, seconds in (
        ("five points on a line", exact),
        ("one point of five took 10 times as long", [*exact[:2], exact[2] * 10, *exact[3:]]),
    ):
        allowed = 0.01 if seconds is exact else 0.3
        latency_s, bytes_per_s = (float(v) for v in module.fit_line(sizes, seconds))
        expected = f"latency 0.0002 s, bandwidth 5e+08 bytes/s, within {allowed:.0%}"
        found = f"latency {latency_s:.4g} s, bandwidth {bytes_per_s:.4g} bytes/s"
        rate_is_off = not abs(bytes_per_s / 5e8 - 1) < allowed
        latency_is_off = not abs(latency_s / 2e-4 - 1) < allowed
        if rate_is_off or latency_is_off:
            hint = _fit_hint(bytes_per_s, seconds is exact)
            raise Shortcoming(hint, expected, found, where=where)


def _fit_hint(bytes_per_s: float, is_exact: bool) -> str:
    if not is_exact:
        return "outlier"
    if abs(bytes_per_s * 5e8 - 1) < 0.1 or bytes_per_s < 1:
        return "slope-is-seconds-per-byte"
    if abs(bytes_per_s / 5e8 / 8 - 1) < 0.1 or abs(bytes_per_s / 5e8 * 8 - 1) < 0.1:
        return "bits"
    return "line"


def _measure(module: Any, recorder: Any, is_slow: bool) -> dict[int, float]:
    recorder.section("ping-pong")
    if not is_slow:
        return _as_numbers(module.measure(list(_SIZES)))
    with recorder.slow_link(_LATENCY_S, _BYTES_PER_S):
        return _as_numbers(module.measure(list(_SIZES)))


def _as_numbers(measured: Any) -> dict[int, float]:
    return {int(size): float(seconds) for size, seconds in dict(measured or {}).items()}


def _judge_times(seconds: dict[int, float], measured: Any) -> None:
    flow = measured.flow("ping-pong")
    where = f"a link of {_LATENCY_S * 1e3:g} ms and {_BYTES_PER_S / 1e6:g} MB/s"
    if set(seconds) != set(_SIZES):
        raise Shortcoming(
            "sizes", f"rank 0 returns seconds for {_SIZES} bytes", f"for {sorted(seconds)}"
        )
    sizes_sent = {call.num_bytes for call in flow.logs[0].of("send")}
    missing = [size for size in _SIZES if size not in sizes_sent]
    if missing:
        raise Shortcoming(
            "bytes-or-elements",
            f"messages of exactly {missing[0]} bytes",
            f"messages of {sorted(sizes_sent)} bytes",
        )
    num_sent = len([c for c in flow.logs[0].of("send") if c.num_bytes == _SIZES[0]])
    if num_sent < 3:
        raise Shortcoming(
            "repeat", "several messages of each size, and their median", f"{num_sent}"
        )
    for size in _SIZES:
        true_s = _LATENCY_S + size / _BYTES_PER_S
        ratio = seconds[size] / true_s
        if abs(ratio - 1) > _ALLOWED:
            raise Shortcoming(
                _time_hint(seconds),
                f"a message of {size} bytes takes {true_s * 1e3:.2f} ms",
                f"{seconds[size] * 1e3:.3f} ms, {ratio:.2g} times as much",
                where=where,
            )


def _time_hint(seconds: dict[int, float]) -> str:
    largest = max(seconds)
    ratio = seconds[largest] / (_LATENCY_S + largest / _BYTES_PER_S)
    if 1.7 < ratio < 2.6:
        return "round-trip"
    if ratio < 0.2:
        return "only-posted"
    if ratio > 2.6:
        return "not-divided-by-repeats"
    return "clock"
