"""The official client's requests, against a stand-in that answers in the API's form."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from drivetrain.core.errors import EnvironmentProblem
from drivetrain.launch import submission
from drivetrain.launch.job import Job
from drivetrain.launch.target import State
from drivetrain.launch.targets.kubernetes.names import object_name
from drivetrain.launch.targets.kubernetes.options import KINDS
from tests.kubernetes.jobs import CPU_JOB, CPU_TARGET, changed
from tests.kubernetes.stand_in import RESOURCES, StandIn, stand_in

PLURALS = {"job": "jobs", "jobset": "jobsets", "trainjob": "trainjobs", "rayjob": "rayjobs"}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with stand_in() as made:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [
                {"name": "c", "cluster": {"server": f"http://127.0.0.1:{made.server_port}"}}
            ],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        }
        path = tmp_path / "kubeconfig"
        path.write_text(yaml.safe_dump(config))
        monkeypatch.setenv("KUBECONFIG", str(path))
        # the client reads the variable when it is imported, and never again
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
        yield made


@pytest.fixture
def job(tmp_path: Path) -> Job:
    made: Job = changed(CPU_JOB, run_dir=str(tmp_path / "runs" / "gpt"))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_submitted_watched_and_stopped(kind: str, server: StandIn, job: Job) -> None:
    target = changed(CPU_TARGET, kind=kind, namespace="training")
    made = submission.submit(target, job)
    name = object_name(job)
    assert made.id == f"{kind}/{name}"
    path = next(at for at in server.objects if at.endswith(f"/{PLURALS[kind]}/{name}"))
    assert "/namespaces/training/" in path
    sent = [*yaml.safe_load_all((Path(job.run_dir) / "job.yaml").read_text())]
    assert list(server.objects.values()) == sent

    assert made.status().state is State.WAITING
    done = {"jobStatus": "SUCCEEDED"} if kind == "rayjob" else None
    ended = {"conditions": [{"type": "Complete", "status": "True"}]}
    server.objects[path]["status"] = done or ended
    assert submission.load(job.run_dir).status().state is State.FINISHED

    submission.stop(job.run_dir)
    assert server.objects == {}
    assert made.status().state is State.STOPPED


def test_resuming_replaces_what_is_left_of_the_run(server: StandIn, job: Job) -> None:
    submission.submit(CPU_TARGET, job)
    path = next(at for at in server.objects if "/jobs/" in at)
    server.objects[path]["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    submission.resume(job.run_dir)
    assert "status" not in server.objects[path]
    assert sum(request.startswith("DELETE") for request in server.requests) == 2


def test_trouble_with_a_pod_is_the_detail_of_the_status(server: StandIn, job: Job) -> None:
    made = submission.submit(CPU_TARGET, job)
    waiting = {"reason": "ImagePullBackOff", "message": "no such tag"}
    server.objects["/api/v1/namespaces/default/pods/p"] = {
        "metadata": {"name": "p"},
        "spec": {"containers": [], "nodeName": "node-a"},
        "status": {
            "phase": "Pending",
            "containerStatuses": [
                {
                    "name": "node",
                    "image": "digits:1",
                    "imageID": "",
                    "ready": False,
                    "restartCount": 0,
                    "state": {"waiting": waiting},
                }
            ],
        },
    }
    status = made.status()
    assert status.state is State.WAITING
    assert "its image cannot be pulled (ImagePullBackOff: no such tag)" in status.detail
    assert status.hosts == ("node-a",)


def test_logs_are_the_first_nodes(server: StandIn, job: Job) -> None:
    made = submission.submit(CPU_TARGET, job)
    assert list(made.logs(follow=False)) == []
    server.objects["/api/v1/namespaces/default/pods/gpt-0"] = {
        "metadata": {"name": "gpt-0", "creationTimestamp": "2024-05-01T00:00:00Z"},
        "spec": {"containers": []},
    }
    assert "".join(made.logs(follow=False)) == server.log


def test_an_operator_that_is_not_installed_is_named(
    server: StandIn, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(RESOURCES, "jobset.x-k8s.io/v1alpha2")
    with pytest.raises(EnvironmentProblem, match=r"no jobset.x-k8s.io/v1alpha2.*operator"):
        submission.submit(changed(CPU_TARGET, kind="jobset"), job)
