"""Lineage: which checkpoints belong to the run, when more than one attempt could write.

An attempt claims its number by creating a file, which only one can, and says in it from which step
it goes on. From then on, whatever an earlier attempt commits beyond that step is not part of the
run: no lock is needed, and a stale attempt that still runs somewhere can do no harm.

A claim has a checksum. One that cannot be read leaves open which checkpoints count: nothing is
loaded, deleted or claimed until a person has decided.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass

from drivetrain.checkpoint.manifest import fingerprint, parse_folder
from drivetrain.checkpoint.storage import Storage
from drivetrain.core.errors import DrivetrainError, EnvironmentProblem, Problem

_CLAIM = re.compile(r"attempt-(\d+)\.json")
_KEYS_WITHOUT_CHECKSUM = {"resumed_step", "host", "time_s"}
"""What a claim said before claims had checksums; such a one is read if it is whole."""


class StaleAttempt(DrivetrainError):
    """Another attempt has taken over the run; this one must write no more."""

    exit_code = 77


@dataclass(frozen=True)
class Claim:
    """An attempt, and the step it resumes from (0: from the start)."""

    attempt: int
    step: int


def belongs(step: int, attempt: int, claims: Iterable[Claim]) -> bool:
    """Whether a checkpoint is part of the run: no later attempt went on from before it."""
    return all(step <= claim.step for claim in claims if claim.attempt > attempt)


def read_claims(storage: Storage) -> list[Claim]:
    """Every attempt that was ever begun, in order; EnvironmentProblem when one cannot be read."""
    return [_parse(number, storage.read(_name(number)), storage) for number in claimed(storage)]


def claimed(storage: Storage) -> list[int]:
    """The numbers that were ever taken, in order, whether or not their claims can be read."""
    found = (_CLAIM.fullmatch(name) for name in storage.names())
    return sorted(int(match[1]) for match in found if match is not None)


def claim_next(storage: Storage, step: int, at_least: int = 1) -> Claim:
    """Take the next number. Several may try at once; each gets one of its own."""
    taken = [claim.attempt for claim in read_claims(storage)]
    # a claim may have been deleted by hand; what its attempt wrote must not be written into
    taken += [parsed[1] for name in storage.names() if (parsed := parse_folder(name))]
    number = max([at_least - 1, *taken]) + 1
    while not storage.create(_name(number), _written(Claim(number, step))):
        number += 1
    return Claim(number, step)


def check_not_stale(storage: Storage, attempt: int) -> None:
    """Raise StaleAttempt when a later attempt exists."""
    newest = max(claimed(storage), default=attempt)
    if newest > attempt:
        raise StaleAttempt(
            f"attempt {attempt} is over: attempt {newest} has taken over this run; "
            "nothing more was written"
        )


def _written(claim: Claim) -> bytes:
    facts = {
        "attempt": claim.attempt,
        "resumed_step": claim.step,
        "host": socket.gethostname(),
        "time_s": time.time(),
    }
    return json.dumps({**facts, "self_crc32": fingerprint(facts)}).encode()


def _parse(number: int, data: bytes, storage: Storage) -> Claim:
    try:
        facts = json.loads(data)
        step = facts["resumed_step"]
        own = facts.pop("self_crc32", None)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _unreadable(number, f"it is no claim ({len(data)} bytes)", storage) from None
    if own is None and not facts.keys() <= _KEYS_WITHOUT_CHECKSUM:
        raise _unreadable(number, "its checksum is missing", storage)
    if own is not None and own != fingerprint(facts):
        raise _unreadable(number, "it does not match its own checksum", storage)
    if type(step) is not int or step < 0:
        raise _unreadable(number, f"it resumes from step {step!r}", storage)
    if facts.get("attempt", number) != number:
        raise _unreadable(number, f"it is attempt {facts['attempt']}'s", storage)
    return Claim(number, step)


def _unreadable(number: int, why: str, storage: Storage) -> EnvironmentProblem:
    rule = (
        f"the claim of attempt {number} cannot be read ({why}), so which checkpoints count is "
        "unknown, and nothing was touched"
    )
    remedy = (
        "if no other attempt of this run is alive, delete this file to resume from the newest "
        "checkpoint"
    )
    return EnvironmentProblem(
        [Problem(f"{storage.address}/{_name(number)}", rule, remedy, None, False)]
    )


def _name(number: int) -> str:
    return f"attempt-{number:05d}.json"
