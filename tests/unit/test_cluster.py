"""Golden tests: variables as real launchers set them (captured from Slurm 22.05, Ray 2.60,
torchrun 2.13, Horovod 0.28; Kubeflow's from its operators' sources, as their first lines say)."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.cluster import Identity, detect
from drivetrain.cluster.environments import first_host
from drivetrain.core.errors import EnvironmentProblem
from drivetrain.record.session import SESSION, launcher_of

GOLDEN = Path(__file__).parents[1] / "golden" / "environments"


def variables(name: str) -> dict[str, str]:
    lines = (GOLDEN / f"{name}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torchrun_worker0", Identity("torchrun", 0, 0, 2, 2, 0, "localhost", 35009)),
        ("torchrun_worker1", Identity("torchrun", 1, 1, 2, 2, 0, "localhost", 35009)),
        ("ray_worker1", Identity("ray", 1, 1, 2, 2, 0, "10.0.0.1", 48059)),
        ("horovod_worker1", Identity("horovod", 1, 1, 2, 2, 0, "127.0.0.1", 0)),
        ("slurm_srun_task0", Identity("slurm", 0, 0, 4, 2, 0, "n1", 20031)),
        ("slurm_srun_task3", Identity("slurm", 3, 1, 4, 2, 1, "n1", 20031)),
        ("slurm_uneven_task1", Identity("slurm", 1, 1, 3, 2, 0, "n1", 20062)),
        ("slurm_uneven_task2", Identity("slurm", 2, 0, 3, 1, 1, "n1", 20062)),
        # the batch script looks like task 0 of 4, but nobody else will come
        ("slurm_batch_script", Identity("single process", 0, 0, 1, 1, 0, "127.0.0.1", 0)),
        (
            "kubeflow_pytorchjob_worker1",
            Identity("kubernetes", 1, 0, 3, 1, 1, "digits-master-0", 23456),
        ),
        (
            "kubeflow_trainjob_node1",
            Identity("kubernetes", 1, 0, 2, 1, 1, "digits-node-0-0.digits", 29500),
        ),
    ],
)
def test_identity_from_a_real_variable_set(name: str, expected: Identity) -> None:
    assert detect(variables(name)) == expected


def test_a_torchrun_inside_another_environment_wins() -> None:
    torchrun = variables("torchrun_worker1")
    for outer in ("slurm_srun_task3", "kubeflow_trainjob_node1", "ray_worker0", "horovod_worker1"):
        assert detect({**variables(outer), **torchrun}).environment == "torchrun"


def test_whoever_sets_torchruns_variables_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", SESSION):
        monkeypatch.delenv(name, raising=False)
    assert launcher_of("torchrun") == "environment variables (RANK, WORLD_SIZE)"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert launcher_of("torchrun") == "torchrun"
    monkeypatch.setenv(SESSION, "of-a-supervisor")
    assert launcher_of("torchrun") == "drivetrain train"
    assert launcher_of("ray") == "ray", "which starts a supervisor's ranks itself"


def test_no_launcher_is_a_world_of_one() -> None:
    assert detect({}) == Identity("single process", 0, 0, 1, 1, 0, "127.0.0.1", 0)


def test_a_stale_rank_is_refused() -> None:
    stale = {**variables("torchrun_worker1"), "RANK": "5"}
    with pytest.raises(EnvironmentProblem, match=r"rank \(torchrun\) = 5: outside a world of 2"):
        detect(stale)


def test_a_variable_that_is_no_number_is_named() -> None:
    broken = {**variables("slurm_srun_task0"), "SLURM_LOCALID": "first"}
    with pytest.raises(EnvironmentProblem, match="SLURM_LOCALID = first: must be a whole number"):
        detect(broken)


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("gpu[003-005,9],login1", "gpu003"),
        ("n1", "n1"),
        ("a-b-c[1,3]", "a-b-c1"),
        ("x1,x2", "x1"),
    ],
)
def test_first_host_of_a_node_list(node_list: str, host: str) -> None:
    assert first_host(node_list) == host
