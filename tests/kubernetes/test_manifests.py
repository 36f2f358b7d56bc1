"""What is rendered: valid by every schema there is, as reviewed in the golden files, and safe."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from drivetrain.launch.job import Job
from drivetrain.launch.targets.kubernetes import Kubernetes
from drivetrain.launch.targets.kubernetes.options import KINDS, amount_of
from tests.kubernetes.crds import SOURCES, schema
from tests.kubernetes.jobs import (
    CPU_JOB,
    CPU_TARGET,
    JOB,
    STORE_JOB,
    STORE_TARGET,
    TARGET,
    changed,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "kubernetes"
CORE_VERSIONS = ("1.33", "1.34")
CASES = {"gpu": (JOB, TARGET), "cpu": (CPU_JOB, CPU_TARGET), "store": (STORE_JOB, STORE_TARGET)}
NAMES = [f"{kind}-{case}" for kind in KINDS for case in CASES]


def of_kind(target: Kubernetes, kind: str) -> Kubernetes:
    version = "2.53.0" if kind == "rayjob" else None
    return dataclasses.replace(target, kind=kind, ray_version=version)


def rendered(name: str) -> str:
    kind, _, case = name.partition("-")
    job, target = CASES[case]
    target = of_kind(target, kind)
    assert target.problems(job) == []
    return target.render(job).text


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(rendered(name)))


@pytest.mark.parametrize("name", NAMES)
def test_the_manifest_is_the_reviewed_one(name: str) -> None:
    """`python -m tests.kubernetes.golden` writes them anew; then look at the difference."""
    assert rendered(name) == (GOLDEN / f"{name}.yaml").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_every_object_is_valid_under_strict_validation(name: str) -> None:
    for document in documents(name):
        validate(document)
        assert_pods_are_valid(document)


def validate(document: dict[str, Any]) -> None:
    if document["kind"] in SOURCES:
        jsonschema.Draft202012Validator(schema(document["kind"])).validate(document)
        return
    for version in CORE_VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


def assert_pods_are_valid(document: dict[str, Any]) -> None:
    """Pod templates inside custom objects, by the core schemas: stricter than the operators'."""
    for spec in pods(document):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec}
        for version in CORE_VERSIONS:
            kubernetes_validate.validate(pod, version, strict=True)


@pytest.mark.parametrize("kind", SOURCES)
def test_the_schemas_notice_a_key_they_do_not_know(kind: str) -> None:
    name = {"JobSet": "jobset-cpu", "RayJob": "rayjob-cpu"}.get(kind, "trainjob-cpu")
    document = next(each for each in documents(name) if each["kind"] == kind)
    document["spec"]["colour"] = "red"
    with pytest.raises(jsonschema.ValidationError, match="colour"):
        validate(document)


def test_core_validation_notices_a_key_it_does_not_know() -> None:
    job = documents("job-cpu")[1]
    job["spec"]["template"]["spec"]["containers"][0]["colour"] = "red"
    with pytest.raises(Exception, match="colour"):
        validate(job)


def holding(node: Any, key: str) -> list[dict[str, Any]]:
    """Every object that has the key, at any depth."""
    if isinstance(node, list):
        return [each for item in node for each in holding(item, key)]
    if not isinstance(node, dict):
        return []
    own = [node] if key in node else []
    return own + [each for value in node.values() for each in holding(value, key)]


def found(node: Any, key: str) -> list[Any]:
    return [each[key] for each in holding(node, key)]


def pods(node: Any) -> list[dict[str, Any]]:
    return holding(node, "containers")


@pytest.mark.parametrize("name", NAMES)
def test_every_pod_is_restricted_and_has_time_to_save(name: str) -> None:
    job = CASES[name.partition("-")[2]][0]
    for pod in pods(documents(name)):
        assert pod["terminationGracePeriodSeconds"] > job.grace_s
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = pod["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        assert pod["automountServiceAccountToken"] is False
        for shm in (each for each in pod.get("volumes", ()) if each["name"] == "shm"):
            assert shm["emptyDir"]["medium"] == "Memory"
            memory = container["resources"].get("limits", {}).get("memory", "1Ti")
            assert (amount_of(shm["emptyDir"]["sizeLimit"]) or 0) < (amount_of(memory) or 0)


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_what_the_job_gives_up_is_not_begun_again_with_a_budget_of_its_own(kind: str) -> None:
    made = documents(f"{kind}-gpu")
    assert found(made, "backoffLimit") == [TARGET.max_retries]
    assert found(made, "maxRestarts") == [0]


def test_rays_head_has_no_place_for_a_rank_and_its_submitter_can_pull_the_image() -> None:
    (rayjob,) = documents("rayjob-gpu")
    assert rayjob["spec"]["rayClusterSpec"]["rayVersion"] == "2.53.0"
    head = rayjob["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert head["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    submitter = rayjob["spec"]["submitterPodTemplate"]["spec"]
    assert submitter["imagePullSecrets"] == [{"name": "registry"}]
    assert "envFrom" not in submitter["containers"][0]  # it submits; secrets are the ranks'


def test_a_variable_of_the_users_replaces_ours() -> None:
    job = dataclasses.replace(JOB, environment=(("HOME", "/home/me"),))
    (container,) = found(list(yaml.safe_load_all(TARGET.render(job).text)), "containers")[0]
    named = [variable["name"] for variable in container["env"]]
    assert sorted(named) == sorted(set(named))
    assert {"name": "HOME", "value": "/home/me"} in container["env"]


def test_a_service_is_not_called_by_a_number() -> None:
    job = dataclasses.replace(JOB, name="3d-unet")
    service = next(yaml.safe_load_all(TARGET.render(job).text))
    assert service["metadata"]["name"].startswith("run-3d-unet-")


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_exit_code_75_is_started_again_and_a_wrong_config_is_not(kind: str) -> None:
    (rules,) = found(documents(f"{kind}-gpu"), "podFailurePolicy")
    by_code = {
        code: rule["action"]
        for rule in rules["rules"]
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert by_code[75] == "Ignore"
    assert by_code[2] == by_code[4] == "FailJob"
    assert any("onPodConditions" in rule for rule in rules["rules"])


@pytest.mark.parametrize("kind", KINDS)
def test_secrets_are_only_named(kind: str) -> None:
    made = documents(f"{kind}-gpu")
    given = found(made, "envFrom")
    assert given == [[{"secretRef": {"name": "wandb"}}]] * (2 if kind == "rayjob" else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_outermost_object_is_queued(kind: str) -> None:
    target = changed(TARGET, kind=kind, queue="research")
    made = list(yaml.safe_load_all(target.render(JOB).text))
    label = "kueue.x-k8s.io/queue-name"
    assert found(made, label) == ["research"]
    assert made[-1]["metadata"]["labels"][label] == "research"


def test_arguments_are_taken_as_they_stand() -> None:
    job: Job = changed(CPU_JOB, script_args=("name=$(HOME)", "a b"))
    text = CPU_TARGET.render(job).text
    args = list(yaml.safe_load_all(text))[1]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[-2:] == ["name=$$(HOME)", "a b"]
    assert args[0] == "--local-addr=$(POD_IP)"


def test_two_runs_of_one_script_do_not_collide() -> None:
    other: Job = changed(CPU_JOB, run_dir="/home/me/project/runs/second")
    names = {
        yaml.safe_load(CPU_TARGET.render(job).text.split("---")[0])["metadata"]["name"]
        for job in (CPU_JOB, other)
    }
    assert len(names) == 2
    assert isinstance(CPU_TARGET, Kubernetes)
