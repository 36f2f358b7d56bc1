"""Mistakes that a cluster would have shown, found before it is rented, at the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.rehearse.client import Rehearsal, RehearsalRequest, rehearse
from drivetrain.rehearse.show import lines

SCRIPT = Path(__file__).parents[1] / "scripts" / "planted.py"


def rehearsed(plant: str, world_size: int, *words: str, memory: int | None = None) -> Rehearsal:
    asked = RehearsalRequest(
        (str(SCRIPT), plant, *words), world_size, device_memory_bytes=memory, timeout_s=900
    )
    return rehearse(asked)


def line_of(plant: str) -> int:
    text = SCRIPT.read_text().splitlines()
    return next(n for n, line in enumerate(text, 1) if line.endswith(f"# HERE: {plant}"))


FSDP = ("parallel.strategy=fsdp",)

pytestmark = [pytest.mark.slow, pytest.mark.long]  # `rehearse` in CI: test_bytes.py


@pytest.mark.parametrize(
    ("plant", "what", "message", "world_size", "words"),
    [
        ("heads", "error", "3", 64, (*FSDP, "parallel.tp=4")),
        ("stage", "config", "4 stages need at least one block each, but the model has 3", 64,
         (*FSDP, "parallel.pp=4", "parallel.pipeline.schedule=gpipe")),
        ("gradient", "missing gradient", "forgotten.weight, forgotten.bias", 64, FSDP),
        ("gradient", "missing gradient", "forgotten.weight, forgotten.bias", 8, ()),
        ("batch", "error", "batch", 64, FSDP),
        ("ids", "error", "index 64 is out of range for an embedding with 64 rows", 64, FSDP),
        ("unequal", "unequal collectives", "all_reduce of 28 B", 64, FSDP),
    ],
)  # fmt: skip
def test_it_is_found_at_its_line(
    plant: str, what: str, message: str, world_size: int, words: tuple[str, ...]
) -> None:
    finding = rehearsed(plant, world_size, *words).findings[0]
    assert finding.what == what
    assert message in finding.message
    assert finding.line is not None
    assert (finding.line.number, Path(finding.line.file)) == (line_of(plant), SCRIPT)


def test_memory_that_only_the_last_stage_lacks() -> None:
    words = (*FSDP, "parallel.pp=2", "parallel.pipeline.schedule=gpipe")
    roomy = rehearsed("memory", 8, *words)
    assert not roomy.findings
    peaks = {report.kind: report.memory.peak for report in roomy.reports}
    assert peaks["last stage"] > 1.2 * peaks["first stage"]
    between = (peaks["last stage"] + peaks["first stage"]) // 2
    tight = rehearsed("memory", 8, *words, memory=between)
    assert {finding.what for finding in tight.findings} == {"out of memory"}
    assert all("last stage" in finding.message for finding in tight.findings)
    found = {finding.line.number for finding in tight.findings if finding.line is not None}
    assert found <= {line_of("memory"), line_of("batch"), line_of("batch") - 1}
    assert found


def test_nothing_is_found_where_nothing_is_planted() -> None:
    rehearsal = rehearsed("nothing", 64, *FSDP, "parallel.tp=2")
    assert rehearsal.findings == ()
    assert len(rehearsal.reports) == 3


def test_idle_ranks_are_warned_of_once() -> None:
    rehearsal = rehearsed("nothing", 64, "micro_batch_size=32", "global_batch_size=64")
    shown = "\n".join(lines(rehearsal))
    assert shown.count("micro-batch slots per step have no samples") == 1
    assert "warning: idle ranks (all): 62 of 64 micro-batch slots" in shown


def test_a_value_that_is_read_is_said() -> None:
    rehearsal = rehearsed("item", 16, *FSDP)
    assert rehearsal.findings == ()
    assert {line.number for r in rehearsal.reports for line in r.values_read} == {line_of("item")}
