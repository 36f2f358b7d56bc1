"""Scalars by the names people read, and in the order they look at them."""

from __future__ import annotations

_TITLES = {
    "train/loss": "Loss",
    "train/learning_rate": "Learning rate",
    "train/grad_norm": "Gradient norm",
    "throughput/samples_per_sec": "Samples per second",
    "throughput/tokens_per_sec": "Tokens per second",
    "throughput/device/mfu": "Model FLOPs utilisation",
}
_FIRST = ("train/loss", "val/", "throughput/", "train/", "system/")


def title_of(name: str) -> str:
    """train/loss → 'Loss'; a name nobody foresaw is its own title."""
    return _TITLES.get(name, name)


def order_of(name: str) -> tuple[int, str]:
    """Loss and validation first, then throughput, how it was trained, the machine, the rest."""
    rank = next((i for i, start in enumerate(_FIRST) if name.startswith(start)), len(_FIRST))
    return rank, name
