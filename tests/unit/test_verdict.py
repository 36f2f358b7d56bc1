"""When a trial of compressed gradients has seen enough."""

from __future__ import annotations

import random

import pytest

from drivetrain.strategies.ddp.communication import MOST_ROUNDS, pays


@pytest.mark.parametrize(
    ("plain", "candidate", "promised_s", "expected"),
    [
        ([1.54], [0.80], 0.68, True),  # the wire's promise, borne out at once
        ([0.18], [0.12], 0.07, True),
        ([0.07], [0.04], 0.002, None),  # much more than promised: something else was slow
        ([1.5], [1.4], 0.7, None),  # backward hides most of it
        ([0.5], [1.5], 0.7, None),  # one slow step decides nothing against it
        ([1.54, 1.50], [0.80, 0.79], 5.0, True),  # apart, whatever was promised
        ([0.5, 0.52], [1.5, 0.9], 0.7, False),  # apart, the other way
        ([1.0, 0.5], [0.6, 0.4], 5.0, None),  # they overlap
        ([1.0] * MOST_ROUNDS, [0.94] * MOST_ROUNDS, 0.5, True),
        ([1.0] * MOST_ROUNDS, [0.96] * MOST_ROUNDS, 0.5, False),
    ],
)
def test_the_rule(
    plain: list[float], candidate: list[float], promised_s: float, expected: bool | None
) -> None:
    assert pays(plain, candidate, promised_s) is expected


def outcome(saved: float, promised_s: float, noise: random.Random) -> tuple[bool, int]:
    """A trial of steps of 100 ms, one in ten of which meets a hiccup as long as itself."""
    plain: list[float] = []
    candidate: list[float] = []
    while True:
        for steps, lasts_s in ((plain, 0.1), (candidate, 0.1 - saved)):
            hiccup_s = 0.1 * noise.random() * 2 if noise.random() < 0.1 else 0.0
            steps.append(lasts_s * noise.uniform(0.95, 1.05) + hiccup_s)
        if (found := pays(plain, candidate, promised_s)) is not None:
            return found, len(plain)


def test_noise_seldom_fools_it_and_a_slow_link_is_seen_at_once() -> None:
    noise = random.Random(0)  # noqa: S311
    nothing = [outcome(0.0, 0.05, noise)[0] for _ in range(4000)]
    # medians of five rounds alone are fooled in 5 % of such trials
    assert sum(nothing) / len(nothing) < 0.08, "kept although nothing was gained"
    half = [outcome(0.05, 0.05, noise) for _ in range(2000)]
    assert sum(found for found, _ in half) / len(half) > 0.97
    assert sum(rounds for _, rounds in half) / len(half) < 1.6
