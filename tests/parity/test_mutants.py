"""A certificate is worth what it catches: every planted bug is found, and where it was planted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.mutants import MUTANTS
from tests.parity.running import HEALTHY, Seen, see_reference
from tests.parity.table import HEALTHY_LAYOUTS, found, planted_in, rows_of

A_HANDFUL = (
    *("OneParameterNotReduced", "DropoutByRank", "WeightDecaySkipped", "SameSamplesTwice"),
    "LastMicroBatchDropped",
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return see_reference(tmp_path_factory.mktemp("reference"))


def check(reference: Seen, folder: Path, layout: str, names: list[str]) -> None:
    for row in rows_of(reference, folder, layout, names):
        if row.name == HEALTHY:
            assert row.parting is None, row
            assert row.divergence is None, str(row.divergence)
        else:
            assert found(row.divergence) == MUTANTS[row.name].expected, (
                f"{row.name}: {row.divergence}"
            )


def test_there_are_enough() -> None:
    assert len(MUTANTS) >= 20
    assert {mutant.layout for mutant in MUTANTS.values()} <= set(HEALTHY_LAYOUTS)


def test_a_handful_is_found(reference: Seen, tmp_path: Path) -> None:
    check(reference, tmp_path, "ddp:2", [HEALTHY, *A_HANDFUL])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("layout", HEALTHY_LAYOUTS)
def test_every_mutant_is_found_and_no_healthy_layout_alarms(
    reference: Seen, tmp_path: Path, layout: str
) -> None:
    check(reference, tmp_path, layout, [HEALTHY, *planted_in(layout)])
