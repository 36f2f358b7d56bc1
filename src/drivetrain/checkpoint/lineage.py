"""Lineage: which checkpoints belong to the run, when more than one attempt could write.

An attempt claims its number by creating a file exclusively, and stores in it the step it resumes
from. From then on, anything an earlier attempt commits beyond that step is not part of the run: no
lock is needed, and a stale attempt that still runs somewhere does no harm.

A claim has a checksum. If a claim cannot be read, it is unknown which checkpoints count: nothing is
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
"""The keys of older claims without a checksum, which are still accepted."""


class StaleAttempt(DrivetrainError):
    """Another attempt has taken over the run; this one must not write anything more."""

    exit_code = 77


@dataclass(frozen=True)
class Claim:
    """An attempt, and the step it resumes from (0: from the start)."""

    attempt: int
    step: int


def belongs(step: int, attempt: int, claims: Iterable[Claim]) -> bool:
    """True if a checkpoint is part of the run: no later attempt resumed from an earlier step."""
    return all(step <= claim.step for claim in claims if claim.attempt > attempt)


def read_claims(storage: Storage) -> list[Claim]:
    """Return all claims in order; raise EnvironmentProblem if one cannot be read."""
    return [_parse(number, storage.read(_name(number)), storage) for number in claimed(storage)]


def claimed(storage: Storage) -> list[int]:
    """Return the claimed numbers in order, whether or not the claims can be read."""
    found = (_CLAIM.fullmatch(name) for name in storage.names())
    return sorted(int(match[1]) for match in found if match is not None)


def claim_next(storage: Storage, step: int, at_least: int = 1) -> Claim:
    """Claim the next number. Several attempts may try at once; each gets a different one."""
    taken = [claim.attempt for claim in read_claims(storage)]
    # a claim may have been deleted by hand: do not write into that attempt's checkpoints
    taken += [parsed[1] for name in storage.names() if (parsed := parse_folder(name))]
    number = max([at_least - 1, *taken]) + 1
    while not storage.create(_name(number), _written(Claim(number, step))):
        number += 1
    return Claim(number, step)


def check_not_stale(storage: Storage, attempt: int) -> None:
    """Raise StaleAttempt if a later attempt exists."""
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
        raise _unreadable(number, f"it is not a claim ({len(data)} bytes)", storage) from None
    if own is None and not facts.keys() <= _KEYS_WITHOUT_CHECKSUM:
        raise _unreadable(number, "its checksum is missing", storage)
    if own is not None and own != fingerprint(facts):
        raise _unreadable(number, "it does not match its own checksum", storage)
    if type(step) is not int or step < 0:
        raise _unreadable(number, f"it resumes from step {step!r}", storage)
    if facts.get("attempt", number) != number:
        raise _unreadable(number, f"it belongs to attempt {facts['attempt']}", storage)
    return Claim(number, step)


def _unreadable(number: int, why: str, storage: Storage) -> EnvironmentProblem:
    rule = (
        f"the claim of attempt {number} cannot be read ({why}), so it is unknown which "
        "checkpoints count, and nothing was changed"
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
