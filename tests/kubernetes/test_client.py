"""The official client's requests, against a stand-in that answers in the API's form."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import yaml

from drivetrain.core.errors import ConfigError, EnvironmentProblem
from drivetrain.launch import submission
from drivetrain.launch.job import Job
from drivetrain.launch.request import read_request
from drivetrain.launch.target import State
from drivetrain.launch.targets.kubernetes.options import KINDS, in_pods, object_name
from tests.kubernetes.jobs import CPU_TARGET, RAY_TARGET, changed
from tests.kubernetes.stand_in import NAMESPACE, RESOURCES, StandIn

PLURALS = {"job": "jobs", "jobset": "jobsets", "trainjob": "trainjobs", "rayjob": "rayjobs"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_submitted_watched_and_stopped(kind: str, server: StandIn, job: Job) -> None:
    target = changed(RAY_TARGET, kind=kind, namespace="training")
    made = submission.submit(target, job)
    name = object_name(job)
    assert made.id == f"{kind}/{name}"
    path = next(at for at in server.objects if at.endswith(f"/{PLURALS[kind]}/{name}"))
    assert "/namespaces/training/" in path
    sent = [*yaml.safe_load_all((Path(job.run_dir) / "job.yaml").read_text())]
    assert {each["kind"]: each for each in server.sent()} == {each["kind"]: each for each in sent}

    assert made.status().state is State.WAITING
    done = {"jobStatus": "SUCCEEDED"} if kind == "rayjob" else None
    ended = {"conditions": [{"type": "Complete", "status": "True"}]}
    server.objects[path]["status"] = done or ended
    assert submission.load(job.run_dir).status().state is State.FINISHED

    submission.stop(job.run_dir)
    assert server.objects == {}
    assert submission.load(job.run_dir).status().state is State.STOPPED


def test_resuming_replaces_what_is_left_of_the_run(server: StandIn, job: Job) -> None:
    submission.submit(CPU_TARGET, job)
    path = next(at for at in server.objects if "/jobs/" in at)
    server.objects[path]["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    submission.resume(job.run_dir)
    assert "status" not in server.objects[path]
    assert sum(request.startswith("DELETE") for request in server.requests) == 1
    assert len(server.objects) == 2


def test_trouble_with_a_pod_is_the_detail_of_the_status(server: StandIn, job: Job) -> None:
    made = submission.submit(CPU_TARGET, job)
    waiting = {"reason": "ImagePullBackOff", "message": "no such tag"}
    containers = [{"name": "node", "image": "digits:1", "state": {"waiting": waiting}}]
    server.add_pod("p", object_name(job), phase="Pending", containerStatuses=containers)
    status = made.status()
    assert status.state is State.WAITING
    assert "its image cannot be pulled (ImagePullBackOff: no such tag)" in status.detail
    assert status.hosts == ("node-a",)


def test_logs_are_the_first_nodes(server: StandIn, job: Job) -> None:
    made = submission.submit(CPU_TARGET, job)
    assert list(made.logs(follow=False)) == []
    server.add_pod("gpt-0", object_name(job), index=0, ip="10.0.0.1")
    assert "".join(made.logs(follow=False)) == server.log


def test_an_operator_that_is_not_installed_is_named(
    server: StandIn, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(RESOURCES, "jobset.x-k8s.io/v1alpha2")
    with pytest.raises(EnvironmentProblem, match=r"no jobset.x-k8s.io/v1alpha2.*operator"):
        submission.submit(changed(CPU_TARGET, kind="jobset"), job)


# Names and folders ---------------------------------------------------------------------------


def test_runs_of_two_folders_and_of_two_users_never_share_a_folder_or_a_name(job: Job) -> None:
    jobs = [
        changed(job, run_dir="/home/a/runs/teamA/gpt", owner="a@desk"),
        changed(job, run_dir="/home/a/runs/teamB/gpt", owner="a@desk"),
        changed(job, run_dir="/home/a/runs/teamA/gpt", owner="b@desk"),
    ]
    assert len({object_name(each) for each in jobs}) == 3
    assert len({in_pods(each, CPU_TARGET).run_dir for each in jobs}) == 3
    again = changed(jobs[0], name="other")
    assert in_pods(again, CPU_TARGET).run_dir == in_pods(jobs[0], CPU_TARGET).run_dir


def test_a_run_keeps_its_owner_whoever_submits_it_again(
    server: StandIn, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    submission.submit(CPU_TARGET, changed(job, owner="a@desk"))
    monkeypatch.setenv("LOGNAME", "b")
    words = ["--on=kubernetes", "--image=digits:1", f"--run-dir={job.run_dir}", "train.py"]
    request = read_request(words)
    assert request is not None
    assert request.job.owner == "a@desk"
    other = read_request([*words[:2], f"--run-dir={job.run_dir}-other", "train.py"])
    assert other is not None
    assert other.job.owner.startswith("b@")


# Submitting again ----------------------------------------------------------------------------


def test_a_run_that_goes_on_is_not_replaced(server: StandIn, job: Job) -> None:
    submission.submit(CPU_TARGET, job)
    before = dict(server.objects)
    with pytest.raises(ConfigError, match=r"waiting as job .*drivetrain stop"):
        submission.submit(CPU_TARGET, job)
    os.remove(Path(job.run_dir) / "job.json")  # another desk, which has no record of it
    with pytest.raises(ConfigError, match=r"waiting.*kubectl delete job"):
        submission.submit(CPU_TARGET, job)
    assert server.objects == before


def test_a_trainjob_is_resumed_although_its_runtime_is_in_use(
    server: StandIn, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.launch.targets.kubernetes.client._GONE_WITHIN_S", 1.0)
    target = changed(CPU_TARGET, kind="trainjob")
    submission.submit(target, job)
    path = server.path_of("trainjobs")
    server.objects[path]["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    submission.resume(job.run_dir)
    assert "status" not in server.objects[path]
    assert len(server.objects) == 2


def test_a_finalizer_that_never_ends_is_named(
    server: StandIn, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.launch.targets.kubernetes.client._GONE_WITHIN_S", 0.1)
    submission.submit(CPU_TARGET, job)
    held = server.objects[server.path_of("jobs")]
    held["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    held["metadata"]["finalizers"] = ["example.com/archive"]
    with pytest.raises(EnvironmentProblem, match=r"example.com/archive"):
        submission.resume(job.run_dir)


# What belongs to a run goes with it ----------------------------------------------------------


def test_a_service_goes_with_its_job(server: StandIn, job: Job) -> None:
    submission.submit(CPU_TARGET, job)
    server.remove(server.path_of("jobs"))
    assert server.objects == {}


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_a_refused_job_leaves_nothing_behind(kind: str, server: StandIn, job: Job) -> None:
    server.refusals[f"POST /{PLURALS[kind]}"] = (403, "exceeded quota")
    with pytest.raises(EnvironmentProblem, match="exceeded quota"):
        submission.submit(changed(CPU_TARGET, kind=kind), job)
    assert server.objects == {}


def test_a_refused_service_leaves_no_job_behind(server: StandIn, job: Job) -> None:
    server.refusals["POST /services"] = (403, "services is forbidden")
    with pytest.raises(EnvironmentProblem, match="services is forbidden"):
        submission.submit(CPU_TARGET, job)
    assert server.objects == {}


# Logs ----------------------------------------------------------------------------------------


def test_logs_are_those_of_rank_0_which_is_where_the_smallest_address_is(
    server: StandIn, job: Job
) -> None:
    made = submission.submit(CPU_TARGET, job)
    server.logs = {"a": "node 1\n", "b": "rank 0\n", "old": "before\n"}
    server.add_pod("old", object_name(job), index=1, ip="10.0.0.1", phase="Failed")
    later = "2024-05-01T00:05:00Z"
    server.add_pod("a", object_name(job), later, index=0, ip="10.0.0.9")
    # as texts, as torchelastic sorts them
    server.add_pod("b", object_name(job), later, index=1, ip="10.0.0.12")
    assert "".join(made.logs(follow=False)) == "rank 0\n"


def test_logs_of_a_pod_that_is_being_created_are_waited_for(
    server: StandIn, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.launch.targets.kubernetes.client._POLL_S", 0.01)
    made = submission.submit(CPU_TARGET, job)
    server.logs["a"] = None
    server.add_pod("a", object_name(job), index=0, phase="Pending")
    assert list(made.logs(follow=False)) == []

    def start() -> None:
        server.logs["a"] = "step 1\n"
        server.add_pod("a", object_name(job), index=0, ip="10.0.0.1", phase="Succeeded")
        _end(server)

    server.after_log["a"] = start
    assert "".join(made.logs(follow=True)) == "step 1\n"


def test_following_goes_on_with_the_pod_that_replaces_another(
    server: StandIn, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.launch.targets.kubernetes.client._POLL_S", 0.01)
    made = submission.submit(CPU_TARGET, job)
    name = object_name(job)
    server.logs = {"a": "step 1\n", "b": "step 2\n"}
    server.add_pod("a", name, index=0, ip="10.0.0.1")

    def replace() -> None:
        server.add_pod("a", name, index=0, ip="10.0.0.1", phase="Failed")
        server.add_pod("b", name, "2024-05-01T00:05:00Z", index=0, ip="10.0.0.2")
        server.after_log["b"] = lambda: _end(server)

    server.after_log["a"] = replace
    assert "".join(made.logs(follow=True)) == "step 1\nstep 2\n"


def test_logs_of_a_rayjob_are_its_submitters(server: StandIn, job: Job) -> None:
    made = submission.submit(changed(RAY_TARGET), job)
    name = object_name(job)
    (sent,) = server.sent()
    labels = sent["spec"]["submitterPodTemplate"]["metadata"]["labels"]
    server.logs = {"head": "ray\n", "submitter": "step 1\n"}
    server.add_pod("head", name, labels={"ray.io/node-type": "head"}, ip="10.0.0.1")
    server.add_pod("submitter", name, labels=labels, ip="10.0.0.2")
    assert "".join(made.logs(follow=False)) == "step 1\n"


def _end(server: StandIn) -> None:
    done = {"conditions": [{"type": "Complete", "status": "True"}]}
    server.objects[server.path_of("jobs")]["status"] = done


# States as the server shows them -------------------------------------------------------------


def test_a_failed_ray_deployment_has_failed(server: StandIn, job: Job) -> None:
    made = submission.submit(RAY_TARGET, job)
    server.objects[server.path_of("rayjobs")]["status"] = {
        "jobStatus": "",
        "jobDeploymentStatus": "Failed",
        "reason": "ValidationFailed",
        "message": "the head's image cannot be pulled",
    }
    status = made.status()
    assert status.state is State.FAILED
    assert "the head's image" in status.detail


def test_a_job_that_is_gone_is_unknown_unless_it_was_stopped(server: StandIn, job: Job) -> None:
    made = submission.submit(CPU_TARGET, job)
    server.objects.clear()  # a day after its end, or by somebody's hand
    assert made.status().state is State.UNKNOWN
    assert "drivetrain status" in made.status().detail
    submission.stop(job.run_dir)
    assert submission.load(job.run_dir).status().state is State.STOPPED


def test_a_stop_that_was_refused_is_no_stop(server: StandIn, job: Job) -> None:
    submission.submit(CPU_TARGET, job)
    server.refusals["DELETE /jobs"] = (403, "jobs.batch is forbidden")
    with pytest.raises(EnvironmentProblem, match="forbidden"):
        submission.stop(job.run_dir)
    assert not submission.load(job.run_dir).is_stopped


def test_events_of_an_earlier_attempt_are_not_shown(server: StandIn, job: Job) -> None:
    made = submission.submit(CPU_TARGET, job)
    name = object_name(job)
    server.add_pod("new", name, "2024-05-01T00:05:00Z", index=0, phase="Pending")
    about = {"kind": "Pod", "name": f"{name}-0-old", "uid": "uid-old"}
    _event(server, "1", about, "FailedMount", "of the pod before")
    about = {"kind": "Job", "name": name, "uid": "of the job before"}
    _event(server, "2", about, "FailedCreate", "exceeded quota, of the job before")
    assert made.status().detail == ""
    _event(server, "3", {"kind": "Pod", "name": "new", "uid": "uid-new"}, "FailedMount", "now")
    assert "its volume cannot be mounted (now)" in made.status().detail


def test_time_that_is_up_is_seen_through_a_jobset(server: StandIn, job: Job) -> None:
    made = submission.submit(changed(CPU_TARGET, kind="jobset"), job)
    over = {"type": "Failed", "status": "True", "reason": "FailedJobs"}
    server.objects[server.path_of("jobsets")]["status"] = {"conditions": [over]}
    deadline = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}
    path = f"/apis/batch/v1/namespaces/default/jobs/{object_name(job)}-node-0"
    server.objects[path] = {"kind": "Job", "metadata": {}, "status": {"conditions": [deadline]}}
    assert made.status().state is State.STOPPED


def _event(server: StandIn, name: str, about: dict[str, str], reason: str, message: str) -> None:
    server.objects[f"{NAMESPACE}/events/{name}"] = {
        "metadata": {"name": name},
        "involvedObject": about,
        "reason": reason,
        "message": message,
        "lastTimestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 5)),
    }


# Servers that do not answer as hoped ---------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "said"), [(401, "log in again"), (403, "access.yaml"), (500, "later")]
)
@pytest.mark.parametrize("act", ["submit", "status", "logs", "stop"])
def test_a_refusal_is_one_sentence(
    code: int, said: str, act: str, server: StandIn, job: Job
) -> None:
    made = submission.submit(CPU_TARGET, job)
    server.add_pod("a", object_name(job), index=0, ip="10.0.0.1")
    if act == "submit":
        made = submission.Submission(CPU_TARGET, changed(job, run_dir=job.run_dir + "2"), "", "")
    server.refusals = {"GET /": (code, "no"), "POST /": (code, "no"), "DELETE /": (code, "no")}
    with pytest.raises(EnvironmentProblem) as caught:
        _do(act, made)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("act", ["submit", "status", "logs", "stop"])
def test_a_server_that_is_down_is_one_sentence(act: str, server: StandIn, job: Job) -> None:
    made = submission.submit(CPU_TARGET, job)
    if act == "submit":
        made = submission.Submission(CPU_TARGET, changed(job, run_dir=job.run_dir + "2"), "", "")
    server.shutdown()
    server.server_close()
    with pytest.raises(EnvironmentProblem, match=r"no API server answers at http://127.0.0.1"):
        _do(act, made)


def _do(act: str, made: submission.Submission) -> None:
    if act == "submit":
        submission.submit(made.target, made.job)
    elif act == "status":
        made.status()
    elif act == "logs":
        list(made.logs(follow=True))
    else:
        submission.stop(made.job.run_dir)
