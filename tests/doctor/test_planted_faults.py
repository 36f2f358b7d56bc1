"""Fifteen faults on real hosts, each named with its fix; on clean hosts, nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.testing.hosts import hosts_available
from tests.doctor.planted import FAULTS, FURTHER, Fault, findings_at, missing_tools, site

REASON = hosts_available() or ", ".join(f"no {tool}" for tool in missing_tools())
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON or "")]


def test_clean_hosts_have_nothing_to_complain_of(tmp_path: Path) -> None:
    with site(tmp_path) as place:
        assert findings_at(place) == []


@pytest.mark.parametrize(  # every second one in CI; `make faults` plants them all
    "fault",
    [
        pytest.param(fault, marks=pytest.mark.long if number % 2 else ())
        for number, fault in enumerate((*FAULTS, *FURTHER))
    ],
    ids=lambda fault: fault.name,
)
def test_a_planted_fault_is_named_with_its_fix(fault: Fault, tmp_path: Path) -> None:
    with site(tmp_path) as place:
        fault.plant(place)
        findings = findings_at(place)
    assert {finding.check for finding in findings} == {fault.check}, findings
    for finding in findings:
        assert fault.host in (*finding.hosts, "")
        assert fault.fix in finding.fix
        assert finding.evidence
