"""A study on real Slurm, Ray and ssh: the trials, promotions and bits of this machine."""

from __future__ import annotations

import importlib.util
import signal
import time
from pathlib import Path

import pytest

from drivetrain.testing.hosts import hosts_available
from drivetrain.testing.ssh import ssh_available
from tests.support.slurm import slurm_available
from tests.tune.on_targets import (
    ENOUGH_S,
    PLACES,
    Desk,
    facts_of,
    killed_and_run,
    local,
    slurm,
    wait_until,
    winner_of,
)

pytestmark = [  # clusters take minutes to come up on two cores: `make tune` runs these
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(2 * ENOUGH_S),
]
WHY_NOT = {
    "hosts": hosts_available() or ssh_available(),
    "slurm": slurm_available(),
    "ray": hosts_available() or (None if importlib.util.find_spec("ray") else "no Ray"),
}


@pytest.fixture(autouse=True)
def _leave_nothing() -> None:
    """The first study is the module's."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("optuna")
    with local(tmp_path_factory.mktemp("local")) as desk:
        desk.run()
        return desk.study


@pytest.mark.parametrize("place", WHY_NOT)
def test_the_same_study_wherever_it_runs(here: Path, tmp_path: Path, place: str) -> None:
    if reason := WHY_NOT[place]:
        pytest.skip(reason)
    with PLACES[place][1](tmp_path) as desk:
        said = killed_and_run(desk)
    assert "adopted" in said
    assert facts_of(desk.study) == facts_of(here)
    assert winner_of(desk.study) == winner_of(here)
    assert {outcome for _, _, outcome, _, _ in facts_of(here)[1]} == {"done", "not_finite"}


@pytest.mark.skipif(bool(WHY_NOT["slurm"]), reason=str(WHY_NOT["slurm"]))
def test_a_controller_that_does_not_answer_loses_no_trial(here: Path, tmp_path: Path) -> None:
    with slurm(tmp_path) as desk:
        said = _silenced(desk)
    assert said.index("slurm does not answer") < said.index("the scheduler answers again")
    assert "resuming" not in said
    assert facts_of(desk.study) == facts_of(here)


def _silenced(desk: Desk) -> str:
    """slurmctld stands still until the driver has noticed."""
    output = desk.folder / "said.txt"
    driver = desk.start(output)
    wait_until((desk.study / "trials/00000/job.json").exists, "a trial is submitted")
    assert desk.cluster is not None
    controller = desk.cluster._daemons["slurmctld"]
    controller.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: "does not answer" in output.read_text(), "the driver has noticed")
        time.sleep(2)
    finally:
        controller.send_signal(signal.SIGCONT)
    assert driver.wait(ENOUGH_S) == 0, output.read_text()
    return output.read_text()
