"""Lineage: which checkpoints belong to the run, when more than one attempt could write.

An attempt claims its number by creating a file, which only one can, and says in it from which step
it goes on. From then on, whatever an earlier attempt commits beyond that step is not part of the
run: no lock is needed, and a stale attempt that still runs somewhere can do no harm.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass

from drivetrain.checkpoint.place import Place
from drivetrain.core.errors import DrivetrainError

_CLAIM = re.compile(r"attempt-(\d+)\.json")


class StaleAttempt(DrivetrainError):
    """Another attempt has taken over the run; this one must write no more."""

    exit_code = 77


@dataclass(frozen=True)
class Claim:
    """An attempt, and the step it goes on from (0: from the start)."""

    attempt: int
    step: int


def belongs(step: int, attempt: int, claims: Iterable[Claim]) -> bool:
    """Whether a checkpoint is part of the run: no later attempt went on from before it."""
    return all(step <= claim.step for claim in claims if claim.attempt > attempt)


def read_claims(place: Place) -> list[Claim]:
    """Every attempt that was ever begun, in order."""
    claims = []
    for name in place.names():
        match = _CLAIM.fullmatch(name)
        if match is not None:
            try:
                step = int(json.loads(place.read(name))["resumed_step"])
            except (ValueError, KeyError, TypeError):
                step = 0  # a claim nobody can read still fences
            claims.append(Claim(int(match[1]), step))
    return sorted(claims, key=lambda claim: claim.attempt)


def claim_next(place: Place, step: int, at_least: int = 1) -> Claim:
    """Take the next number. Several may try at once; each gets one of its own."""
    number = max([at_least - 1, *(claim.attempt for claim in read_claims(place))]) + 1
    while True:
        facts = {"resumed_step": step, "host": socket.gethostname(), "time_s": time.time()}
        if place.create(_name(number), json.dumps(facts).encode()):
            return Claim(number, step)
        number += 1


def check_not_stale(place: Place, attempt: int) -> None:
    """Raise StaleAttempt when a later attempt exists."""
    newest = max((claim.attempt for claim in read_claims(place)), default=attempt)
    if newest > attempt:
        raise StaleAttempt(
            f"attempt {attempt} is over: attempt {newest} has taken over this run; "
            "nothing more was written"
        )


def _name(number: int) -> str:
    return f"attempt-{number:05d}.json"
