"""What to change in a config whose training diverges: only what it has not set yet."""

from __future__ import annotations

_RATE = {
    True: "lower the learning rate of the script's optimizer",
    False: "lower optimization.learning_rate",
    None: "lower the learning rate (optimization.learning_rate, or in the script if it makes its "
    "own optimizer)",
}


def against_divergence(*, is_clipped: bool, has_own_optimizer: bool | None) -> list[str]:
    """Return what to change; `has_own_optimizer` is None where it is not known."""
    rate = _RATE[has_own_optimizer]
    return [rate] if is_clipped else [rate, "set optimization.max_grad_norm"]
