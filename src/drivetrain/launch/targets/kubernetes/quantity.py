"""Kubernetes' quantities: 8, 7500m, 64Gi, 1e3."""

from __future__ import annotations

import re

_FORM = re.compile(r"(\d+(?:\.\d+)?)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE]\d+)?")
_DECIMAL = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", start=1)}


def amount_of(text: str) -> float | None:
    """The number meant; None when Kubernetes would refuse it."""
    match = _FORM.fullmatch(text)
    if match is None:
        return None
    number, unit = float(match[1]), match[2]
    if unit is None:
        return number
    if unit[0] in "eE" and unit[1:].isdigit():
        return number * 10.0 ** int(unit[1:])
    return number * {**_DECIMAL, **_BINARY}[unit]
