"""What the flags of `drivetrain train` accept, checked before anything is started or submitted.

torchrun's own parser and its rendezvous check some of them, late, with a usage text or a traceback.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from drivetrain.core.errors import Problem


@dataclass(frozen=True)
class _Accepts:
    rule: str
    example: str
    is_valid: Callable[[str], bool]


def _is_whole(text: str, least: int = 0) -> bool:
    return text.isascii() and text.isdigit() and int(text) >= least


def _whole(example: int, least: int = 0) -> _Accepts:
    rule = f"must be a whole number, at least {least}"
    return _Accepts(rule, str(example), lambda text: _is_whole(text, least))


def _seconds(example: int, *, or_none: bool = False, or_ever: bool = False) -> _Accepts:
    def is_valid(text: str) -> bool:
        try:
            number = float(text)
        except ValueError:
            return False
        is_enough = number > 0 or (or_none and number == 0)
        return is_enough and (math.isfinite(number) or or_ever)

    rule = f"must be a number of seconds, {'0 or more' if or_none else 'more than 0'}"
    return _Accepts(rule + (", or inf" if or_ever else ""), str(example), is_valid)


def _matches(rule: str, example: str, pattern: str) -> _Accepts:
    return _Accepts(rule, example, lambda text: re.fullmatch(pattern, text) is not None)


def _are_nodes(text: str) -> bool:
    fewest, _, most = text.partition(":")
    return all(_is_whole(each, 1) for each in (fewest, most or fewest)) and not text.endswith(":")


def _are_ranks(text: str) -> bool:
    return _is_whole(text, 1) or text.isidentifier()  # which kinds of device there are, torch knows


def _is_endpoint(text: str) -> bool:
    host, has_port, port = text.strip().rpartition(":")
    is_host_alone = not has_port or text.strip().endswith("]")  # [::1] is an address without a port
    return is_host_alone or (bool(host) and _is_port(port))


def _is_port(text: str) -> bool:
    return _is_whole(text) and int(text) <= 65535


RULE_OF_RANKS = "must be a whole number, at least 1, or auto, cpu, gpu or xpu"
_STREAMS = _matches(
    "must be 0 to 3 (1 is stdout, 2 stderr, 3 both), or that for each rank",
    "3",
    r"[0-3]|(\d:[0-3],)*\d:[0-3]",
)
_OF_TORCHRUN = {
    "--nnodes": _Accepts("must be a whole number, at least 1, or MIN:MAX", "2", _are_nodes),
    "--nproc-per-node": _Accepts(RULE_OF_RANKS, "2", _are_ranks),
    "--max-restarts": _whole(3),
    "--monitor-interval": _seconds(1, or_none=True),
    "--shutdown-timeout": _whole(30),
    "--node-rank": _whole(0),
    "--master-port": _Accepts("must be a port, 0 to 65535", "29500", _is_port),
    "--rdzv-endpoint": _Accepts("must be HOST or HOST:PORT", "node-0:29400", _is_endpoint),
    "--rdzv-conf": _matches(
        "must be key=value, with commas", "join_timeout=600", r"\s*|[^,=]+=[^,]+(,[^,=]+=[^,]+)*"
    ),
    "--redirects": _STREAMS,
    "--tee": _STREAMS,
    "--local-ranks-filter": _matches(
        "must be ranks, with commas", "0,1", r"\s*(\d+\s*(,\s*\d+\s*)*)?"
    ),
}
_SHORT = {"-r": "--redirects", "-t": "--tee"}
"""Short forms; torchrun's variables are named after the long ones only."""
_ACCEPTED = {
    **_OF_TORCHRUN,
    **{short: _OF_TORCHRUN[flag] for short, flag in _SHORT.items()},
    "--spares": _whole(1),
    "--grace-period": _seconds(30, or_none=True),
    "--stall-timeout": _seconds(60, or_ever=True),
    "--slow-timeout": _seconds(900, or_ever=True),
    "--max-preemptions": _whole(1000),
    "--max-startup-failures": _whole(3),
    "--gpus-per-node": _whole(8),
}


def value_problem(flag: str, value: str, typed: str) -> Problem | None:
    """Return what is wrong with a flag's value; `typed` is the name that the user gave the flag."""
    accepted = _ACCEPTED.get(flag)
    if accepted is None or accepted.is_valid(value):
        return None
    return Problem(typed, accepted.rule, f"{typed} {accepted.example}", value)


def environment_problems(given: Collection[str]) -> list[Problem]:
    """Return what is wrong with torchrun's variables, such as PET_NNODES, of flags not given."""
    found = []
    for flag in _OF_TORCHRUN.keys() - {_SHORT.get(flag, flag) for flag in given}:
        name = f"PET_{flag.strip('-').replace('-', '_').upper()}"
        accepted = _OF_TORCHRUN[flag]
        value = os.environ.get(name)
        if value is not None and not accepted.is_valid(value):
            found.append(Problem(name, accepted.rule, f"{name}={accepted.example}", value))
    return found
