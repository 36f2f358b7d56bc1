"""TensorFlow for real: workers, hosts and servers, of which one is killed. `make tensorflow`."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from drivetrain.record.ledger import ledger_of
from drivetrain.record.reading import open_run
from drivetrain.record.run_directory import RunDirectory
from drivetrain.testing.hosts import hosts_available, make_hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("tensorflow") is None, reason="`make tensorflow` installs it"),
]
SCRIPT = Path(__file__).with_name("train.py")
TOLERANCE = 1e-5
"""Relative. Two workers add in another order than one, and Adam divides by small numbers."""


TRAIN = ("-m", "drivetrain", "train", "--backend", "tensorflow")


def train(folder: Path, *argv: str, kill_at: int = 0, servers: int = 0) -> dict[str, Any]:
    folder.mkdir()
    command = [sys.executable, *argv, *script(kill_at, servers)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return found_in(folder, done.stdout + done.stderr)


def train_on_hosts(folder: Path, kill_at: int) -> dict[str, Any]:
    """Two of them, one worker on each, that meet in the run's directory."""
    folder.mkdir()
    asked = [*TRAIN, "--nnodes", "2", "--nproc-per-node", "1", "--run-dir", str(folder / "run")]
    command = [sys.executable, *asked, *script(kill_at)]
    with make_hosts(2) as hosts, ExitStack() as stack:
        files = [stack.enter_context(open(folder / f"{host.name}.log", "w+")) for host in hosts]
        started = [
            host.popen(command, cwd=folder, stdout=file, stderr=subprocess.STDOUT)
            for host, file in zip(hosts, files, strict=True)
        ]
        ended = [each.wait(550) for each in started]
    said = "".join((folder / f"h{number}.log").read_text() for number in (1, 2))
    assert ended == [0, 0], said[-6000:]
    return found_in(folder, said)


def script(kill_at: int, servers: int = 0) -> list[str]:
    return [str(SCRIPT), "found.json", str(kill_at), str(servers)]


def found_in(folder: Path, said: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    assert "signal 9" in said or "SIGKILL" in said or "one" in folder.name
    return {**found, "said": said}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One worker, never killed."""
    found = train(tmp_path_factory.mktemp("alone") / "one")
    assert found["strategy"] == "MirroredStrategy"
    return found


def check_resumed(two: dict[str, Any], one: dict[str, Any]) -> None:
    """It died in the fourth epoch of four steps each, and ends where one worker ends."""
    assert two["strategy"] == "CollectiveAllReduceStrategy"  # MultiWorkerMirroredStrategy's own
    assert two["epochs"] == [3, 4, 5]
    assert two["losses"] == pytest.approx(one["losses"][3:], rel=TOLERANCE)
    assert two["final_loss"] == pytest.approx(one["final_loss"], rel=TOLERANCE)
    assert len(RunDirectory(Path(two["run_dir"])).attempts()) >= 2
    assert ledger_of(open_run(two["run_dir"])).seconds["productive"] > 0


def test_two_workers_one_killed_end_with_one_workers_loss(
    tmp_path: Path, alone: dict[str, Any]
) -> None:
    check_resumed(train(tmp_path / "two", *TRAIN, "--nproc-per-node", "2", kill_at=14), alone)


@pytest.mark.skipif(hosts_available() is not None, reason=str(hosts_available()))
def test_two_hosts_one_worker_killed_end_with_one_workers_loss(
    tmp_path: Path, alone: dict[str, Any]
) -> None:
    two = train_on_hosts(tmp_path / "hosts", kill_at=14)
    check_resumed(two, alone)
    assert two["host"] in ("h1", "h2")
    check_tensorboard(Path(two["run_dir"]), two["losses"])


def check_tensorboard(run: Path, losses: list[float]) -> None:
    """What TensorBoard reads of the run: each epoch's loss, the redone one once."""
    command = [sys.executable, str(Path(__file__).with_name("read_events.py")), str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = {int(step): loss for step, loss in json.loads(done.stdout).items()}
    # the sink writes every two seconds: epochs that ended just before the kill may not be there
    assert {4, 8, 12, 16, 20, 24} >= found.keys() >= {16, 20, 24}
    assert [found[step] for step in (16, 20, 24)] == pytest.approx(losses, rel=1e-6)


def test_parameter_servers_go_on_after_a_worker_was_killed(tmp_path: Path) -> None:
    """A coordinator, a server and two workers. Asynchronous: it learns, and is nobody's equal."""
    four = [*TRAIN, "--nproc-per-node", "4"]
    found = train(tmp_path / "servers", *four, kill_at=3, servers=1)
    assert found["strategy"] == "ParameterServerStrategyV2"
    assert found["epochs"] == [3, 4, 5]
    assert found["losses"][-1] < 1.6
    assert found["final_loss"] < found["losses"][0]
    assert len(RunDirectory(Path(found["run_dir"])).attempts()) == 2


def test_keras_on_torch_is_refused_under_fsdp(tmp_path: Path) -> None:
    """Its layers keep the weights they were made with: fsdp would train nothing."""
    example = Path(__file__).parents[2] / "examples" / "keras_on_torch.py"
    words = ["-m", "drivetrain", "train", str(example), "--nproc-per-node", "2"]
    command = [sys.executable, *words, "max_steps=4", "parallel.strategy=fsdp"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no weight of Sequential got a gradient" in done.stderr
