"""Ray Train on a real cluster of two hosts: the same numbers, and nothing lost."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain.testing.hosts import Hosts, hosts_available, make_hosts
from drivetrain.testing.ray_cluster import RayCluster, make_ray_cluster
from tests.ray.runs import (
    BITWISE,
    ENOUGH_S,
    PROJECT,
    alone,
    finish,
    lives,
    losses,
    num_steps,
    start,
    wait_until,
    weights,
)

REASON = hosts_available() or (
    None if importlib.util.find_spec("ray") else "Ray is not installed: pip install drivetrain[ray]"
)
pytestmark = [  # a Ray cluster takes minutes to come up on two cores: `make ray` runs these
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(2 * ENOUGH_S),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]


@pytest.fixture(autouse=True)
def _leave_nothing() -> None:
    """A host that is brought back belongs to the module's cluster: it outlives its test."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with make_hosts(2) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(hosts: Hosts) -> Iterator[RayCluster]:
    # not pytest's folder: the path of a socket has a limit
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        make_ray_cluster(hosts, Path(folder)) as made,
    ):
        yield made


def test_a_killed_worker_costs_nothing_but_time(cluster: RayCluster, tmp_path: Path) -> None:
    """Two hosts against one process: every loss and every bit of the weights, kill or no kill."""
    expected = alone(tmp_path / "alone", "ray_hurt.py", *BITWISE)
    run = tmp_path / "ray"
    driver = start(cluster, run, "ray_hurt.py", *BITWISE, "die_at=13", flags=("--nodes=2",))
    finish(driver, run)
    assert [life["world_size"] for life in lives(run)] == [2, 2]
    assert losses(run) == losses(expected)
    assert weights(run) == weights(expected)


def test_a_mistake_in_the_config_is_not_tried_again(cluster: RayCluster, tmp_path: Path) -> None:
    run = tmp_path / "ray"
    driver = start(cluster, run, "ray_hurt.py", "max_stepz=3", flags=("--nodes=2",))
    assert driver.wait(ENOUGH_S) == 5
    output = (run / "output.txt").read_text()
    assert output.rstrip().endswith("did you mean max_steps?")
    assert "Error count: 2" not in output, "Ray has started it again"


def test_a_crashed_host_comes_back_and_the_run_ends_the_same(
    cluster: RayCluster, hosts: Hosts, tmp_path: Path
) -> None:
    expected = alone(tmp_path / "alone", "ray_hurt.py", *BITWISE)
    run = tmp_path / "ray"
    driver = start(cluster, run, "ray_hurt.py", *BITWISE, "pause_s=0.3", flags=("--nodes=2",))
    wait_until(lambda: num_steps(run) >= 12, driver)
    hosts[1].crash()
    cluster.join(hosts[1])
    finish(driver, run)
    assert [life["world_size"] for life in lives(run)] == [2, 2]
    assert weights(run) == weights(expected)


def test_elastic_two_to_one_to_two(cluster: RayCluster, hosts: Hosts, tmp_path: Path) -> None:
    words = (*BITWISE, "max_steps=120", "checkpoint.every_steps=2")
    expected = alone(tmp_path / "alone", "ray_hurt.py", *words)
    run = tmp_path / "ray"
    flags = ("--nodes=1:2", "--resize-interval=5")
    driver = start(cluster, run, "ray_hurt.py", *words, "pause_s=0.5", flags=flags)
    wait_until(lambda: num_steps(run) >= 6, driver)
    hosts[1].crash()
    wait_until(lambda: lives(run)[-1]["world_size"] == 1 and len(lives(run)) > 1, driver)
    at = num_steps(run)
    wait_until(lambda: num_steps(run) >= at + 3, driver)
    cluster.join(hosts[1])
    finish(driver, run)
    sizes = [life["world_size"] for life in lives(run)]
    assert sizes[0] == sizes[-1] == 2
    assert 1 in sizes
    assert losses(run) == losses(expected)
    assert weights(run) == weights(expected)


def test_the_drop_in_trainer_trains_and_brings_the_weights_back(
    cluster: RayCluster, tmp_path: Path
) -> None:
    script = PROJECT / "tests" / "scripts" / "ray_drop_in.py"
    done = cluster.head.run(
        [sys.executable, script, tmp_path], env=cluster.environment, timeout_s=ENOUGH_S
    )
    assert "steps 24, trained True" in done.stdout
    assert "agrees True" in done.stdout


def test_ray_data_gives_the_numbers_of_a_plain_stream(tmp_path: Path) -> None:
    expected = alone(tmp_path / "alone", "ray_rows.py", "plain")
    with (
        make_hosts(2) as hosts,
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        # rows are read by tasks of Ray, which need a CPU beside the worker's
        make_ray_cluster(hosts, Path(folder), cpus_per_host=2) as cluster,
    ):
        run = tmp_path / "ray"
        finish(start(cluster, run, "ray_rows.py", flags=("--nodes=2",)), run)
    assert losses(run) == pytest.approx(losses(expected), rel=1e-6)


@pytest.mark.parametrize(
    ("way_in", "token"),
    [("job_server", None), ("client_server", None), ("job_server", "0123456789abcdef" * 2)],
)
def test_submitted_stopped_and_gone_on_with(tmp_path: Path, way_in: str, token: str | None) -> None:
    """All verbs, through Ray's job server."""
    expected = alone(tmp_path / "alone", "ray_hurt.py", *BITWISE)
    run = tmp_path / "ray"
    with (
        make_hosts(2) as hosts,
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        make_ray_cluster(hosts, Path(folder), has_job_server=True, token=token) as cluster,
    ):

        def desk(*words: str | Path) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "drivetrain", *words]
            return cluster.head.run(
                command, env=cluster.environment, cwd=PROJECT, timeout_s=ENOUGH_S
            )

        said = desk(
            *("train", "--on=ray", f"--address={getattr(cluster, way_in)}", "--nodes=2"),
            *(f"--run-dir={run}", "tests/scripts/ray_hurt.py", *BITWISE),
            *("record.progress=plain", "pause_s=0.3"),
        ).stdout
        assert "ray job raysubmit_" in said
        wait_until(lambda: num_steps(run) >= 8)
        assert desk("jobs", run).stdout.startswith("running")
        desk("stop", run)
        assert desk("jobs", run).stdout.startswith("stopped")
        assert 8 <= num_steps(run) < 30
        desk("resume", run)
        log = desk("logs", run, "-f").stdout
        assert "resumed: after step" in log, log
        assert desk("jobs", run).stdout.startswith("finished")
    assert weights(run) == weights(expected)
