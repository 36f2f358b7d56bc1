"""Fifteen faults on real hosts, each named with its fix; on clean hosts, nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.core.finding import EnvironmentFinding
from drivetrain.testing.hosts import hosts_available
from tests.doctor.planted import FAULTS, FURTHER, Fault, findings_at, missing_tools, site

REASON = hosts_available() or ", ".join(f"no {tool}" for tool in missing_tools())
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON or "")]


def test_clean_hosts_have_nothing_to_complain_of(tmp_path: Path) -> None:
    with site(tmp_path) as place:
        assert _sure(findings_at(place)) == []


def _sure(findings: list[EnvironmentFinding]) -> list[EnvironmentFinding]:
    """Between hosts that are one machine a link is as fast as the processor, which others use."""
    return [finding for finding in findings if finding.check != "bandwidth"]


@pytest.mark.parametrize(  # every fourth one in CI; `make faults` plants them all
    "fault",
    [
        pytest.param(fault, marks=pytest.mark.long if number % 8 else ())
        for number, fault in enumerate((*FAULTS, *FURTHER))
    ],
    ids=lambda fault: fault.name,
)
def test_a_planted_fault_is_named_with_its_fix(fault: Fault, tmp_path: Path) -> None:
    with site(tmp_path) as place:
        fault.plant(place)
        findings = findings_at(place)
    if fault.check != "bandwidth":
        findings = _sure(findings)
    assert {finding.check for finding in findings} == {fault.check}, findings
    for finding in findings:
        assert fault.host in (*finding.hosts, "")
        assert fault.fix in finding.fix
        assert finding.evidence
