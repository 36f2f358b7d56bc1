"""Lineage, intervals and retention."""

from __future__ import annotations

import json
import math
import socket
import time
from pathlib import Path

import pytest

from drivetrain.checkpoint import lineage
from drivetrain.checkpoint.interval import best_interval
from drivetrain.checkpoint.manifest import fingerprint
from drivetrain.checkpoint.retention import outdated
from drivetrain.checkpoint.storage import LocalStorage
from drivetrain.config.schema import Checkpoint
from drivetrain.core.errors import EnvironmentProblem


def test_an_interval_is_never_less_than_a_step_and_long_saves_make_it_longer() -> None:
    assert best_interval(1.0, 1e9, 0, 0.0).steps == 1
    assert best_interval(0.0, 1.0, 0, 0.0).steps == round(math.sqrt(2 * 1e-3 * 4 * 3600))
    assert best_interval(1.0, 1.0, 0, 0.0, beside_s=500.0).steps == 1000
    assert best_interval(1e6, 0.0, 0, 0.0).steps == 1800 * 10**6
    assert best_interval(2.0, 0.5, 3, 4 * 3600.0).why == (
        "√(2 × 2000 ms a save × 2.0 h between failures) = 170 s = 339 steps of 500.0 ms "
        "(3 failures in 4.0 h so far)"
    )
    assert "(0 failures in 59 s so far)" in best_interval(1.0, 1.0, 0, 59.0).why
    assert "(0 failures in 1.0 h so far)" in best_interval(1.0, 1.0, 0, 3600.0).why


def test_what_is_kept_for_its_score_is_the_first_of_equals() -> None:
    rule = Checkpoint(keep_last=1, keep_best="loss")
    assert outdated([1, 2, 3], rule, {1: 0.5, 2: 0.5}) == [2]
    assert outdated([1, 2, 3], rule, None) == [2, 1]
    assert outdated([1, 2, 3], rule, {}) == [2, 1]
    assert outdated([], rule, {1: 0.5}) == []
    assert outdated([2, 2, 1], Checkpoint(keep_last=2)) == []


def test_a_claim_says_who_when_and_from_where(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    before_s = time.time()
    assert lineage.claim_next(storage, 6, at_least=3) == lineage.Claim(3, 6)
    assert storage.names() == ["attempt-00003.json"]
    facts = json.loads(storage.read("attempt-00003.json"))
    own = facts.pop("self_crc32")
    assert own == fingerprint(facts)
    assert before_s <= facts.pop("time_s") <= time.time()
    assert facts == {"attempt": 3, "resumed_step": 6, "host": socket.gethostname()}
    assert lineage.claim_next(storage, 7) == lineage.Claim(4, 7)
    assert lineage.read_claims(storage) == [lineage.Claim(3, 6), lineage.Claim(4, 7)]
    assert lineage.claim_next(LocalStorage(tmp_path / "new"), 0).attempt == 1


def test_an_attempt_that_was_replaced_is_told_by_whom(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    lineage.check_not_stale(storage, 1)
    lineage.claim_next(storage, 0)
    lineage.claim_next(storage, 0)
    lineage.check_not_stale(storage, 2)
    with pytest.raises(lineage.StaleAttempt) as caught:
        lineage.check_not_stale(storage, 1)
    assert str(caught.value) == (
        "attempt 1 is over: attempt 2 has taken over this run; nothing more was written"
    )
    assert caught.value.exit_code == 77


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (b"{}", "it is not a claim (2 bytes)"),
        (b"[1]", "it is not a claim (3 bytes)"),
        (b'{"resumed_step": 0, "attempt": 1}', "its checksum is missing"),
        (b'{"resumed_step": 0, "self_crc32": "x"}', "it does not match its own checksum"),
        (b'{"resumed_step": -1}', "it resumes from step -1"),
        (b'{"resumed_step": true}', "it resumes from step True"),
    ],
)
def test_why_a_claim_cannot_be_read(tmp_path: Path, facts: bytes, why: str) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("attempt-00001.json", facts)
    with pytest.raises(EnvironmentProblem) as caught:
        lineage.read_claims(storage)
    assert str(caught.value) == (
        f"{tmp_path}/attempt-00001.json: the claim of attempt 1 cannot be read ({why}), so it is "
        "unknown which checkpoints count, and nothing was changed; if no other attempt of this run "
        "is alive, delete this file to resume from the newest checkpoint"
    )


def test_a_claim_under_anothers_name_is_not_read(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    facts = {"attempt": 2, "resumed_step": 0}
    text = json.dumps({**facts, "self_crc32": fingerprint(facts)}).encode()
    storage.put("attempt-00001.json", text)
    with pytest.raises(EnvironmentProblem, match=r"\(it belongs to attempt 2\)"):
        lineage.read_claims(storage)
    storage.remove("attempt-00001.json")
    storage.put("attempt-00002.json", text)
    storage.put("attempt-x.json", b"no claim at all")
    assert lineage.read_claims(storage) == [lineage.Claim(2, 0)]
    first = b'{"resumed_step": 0, "host": "h", "time_s": 1.0}'  # before claims had checksums
    storage.put("attempt-00001.json", first)
    assert lineage.claimed(storage) == [1, 2]
    assert lineage.read_claims(storage)[0] == lineage.Claim(1, 0)
