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
    if name.startswith("val/"):
        return f"Validation {name.removeprefix('val/').replace('_', ' ')}"
    return _TITLES.get(name, name)


def is_drawn(name: str) -> bool:
    """Not a step's seconds: the ledger and the map of ranks have them for every step."""
    return not name.startswith("time/")


def is_about_the_machine(name: str) -> bool:
    """Looked at when something is wrong."""
    return name.startswith("system/")


def order_of(name: str) -> tuple[int, str]:
    """Loss and validation first, then throughput, how it was trained, the machine, the rest."""
    rank = next((i for i, start in enumerate(_FIRST) if name.startswith(start)), len(_FIRST))
    return rank, name
