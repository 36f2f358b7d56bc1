"""What is under deploy/: valid by the same schemas, and in step with what is rendered."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from drivetrain.launch.command import add_our_flags, parse_command
from tests.kubernetes.jobs import CPU_JOB, CPU_TARGET
from tests.kubernetes.test_manifests import CORE_VERSIONS, holding

DEPLOY = Path(__file__).parents[2] / "deploy"
BASE = DEPLOY / "kustomize" / "base"
MONITORING = DEPLOY / "kustomize" / "prometheus-operator"
EXAMPLE = DEPLOY / "kustomize" / "example"


def objects(folder: Path = BASE) -> list[dict[str, Any]]:
    names = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    return [each for name in names for each in yaml.safe_load_all((folder / name).read_text())]


def test_the_base_is_valid_under_strict_validation() -> None:
    checked = 0
    for document in objects():
        for version in CORE_VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
        checked += 1
    assert checked >= 5


def test_the_network_policy_and_the_metrics_find_the_pods_of_a_run() -> None:
    job = list(yaml.safe_load_all(CPU_TARGET.render(CPU_JOB).text))[1]
    labels = job["spec"]["template"]["metadata"]["labels"].items()
    by_kind = {document["kind"]: document for document in objects()}
    policy = by_kind["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    service = by_kind["Service"]["spec"]["selector"]
    assert policy.items() <= labels
    assert service.items() <= labels
    (made,) = objects(MONITORING)
    monitor = made["spec"]["selector"]["matchLabels"]
    assert monitor.items() <= by_kind["Service"]["metadata"]["labels"].items()


def test_the_role_covers_every_kind_that_is_created() -> None:
    from drivetrain.launch.targets.kubernetes.manifests import objects as rendered
    from drivetrain.launch.targets.kubernetes.options import KINDS
    from tests.kubernetes.jobs import changed

    role = next(document for document in objects() if document["kind"] == "Role")
    allowed = {
        (group, resource)
        for rule in role["rules"]
        if {"create", "get", "delete"} <= set(rule["verbs"])
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    for kind in KINDS:
        for document in rendered(CPU_JOB, changed(CPU_TARGET, kind=kind)):
            group = document["apiVersion"].rpartition("/")[0]
            assert (group, f"{document['kind'].lower()}s") in allowed


def test_the_compose_nodes_say_what_drivetrain_understands() -> None:
    import argparse

    content = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    parser = argparse.ArgumentParser()
    for flag in ("--nnodes", "--nproc-per-node"):
        parser.add_argument(flag)
    add_our_flags(parser)
    for name in ("node-a", "node-b"):
        node = content["services"][name]
        verb, *words = node["command"]
        assert verb == "train"
        command = parse_command(words, parser)
        assert (DEPLOY.parent / command.script).is_file()
        grace = next(float(v) for v in [node["stop_grace_period"].rstrip("s")])
        assert grace > 30
        assert holding(node, "nofile")


def test_the_base_needs_no_operator() -> None:
    """kubectl apply -k fails as a whole when the cluster does not know one of the kinds."""
    for document in objects():
        group = document["apiVersion"].rpartition("/")[0]
        assert group == "" or group.endswith("k8s.io"), document["kind"]
    assert [document["kind"] for document in objects(MONITORING)] == ["ServiceMonitor"]


def test_the_role_is_bound() -> None:
    by_kind = {document["kind"]: document for document in objects()}
    binding = by_kind["RoleBinding"]
    assert binding["roleRef"]["name"] == by_kind["Role"]["metadata"]["name"]
    assert binding["subjects"]


def test_the_network_policy_lets_kuberay_ask_the_dashboard() -> None:
    policy = next(document for document in objects() if document["kind"] == "NetworkPolicy")
    port = {"port": 8265, "protocol": "TCP"}
    (rule,) = [each for each in policy["spec"]["ingress"] if port in each.get("ports", ())]
    (source,) = rule["from"]
    assert source["namespaceSelector"] == {}  # the operator has a namespace of its own
    assert source["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "kuberay-operator"}


def test_the_image_has_what_kuberays_probes_call() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    installed = next(line for line in text.splitlines() if "apt-get install" in line)
    assert "wget" in installed
    assert "EXTRAS=" in text
    assert ",ray" in text, "how to build one with Ray"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_the_example_says_what_only_a_cluster_knows() -> None:
    built = subprocess.run(
        ["kubectl", "kustomize", str(EXAMPLE)], capture_output=True, text=True, check=True
    )
    made = {each["kind"]: each for each in yaml.safe_load_all(built.stdout)}
    assert made["PersistentVolumeClaim"]["spec"]["storageClassName"]
    assert made["RoleBinding"]["subjects"][0]["name"] != "drivetrain-users"
    assert {each["metadata"]["namespace"] for each in made.values()} == {"training"}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_kustomize_builds_the_base() -> None:
    built = subprocess.run(
        ["kubectl", "kustomize", str(BASE)], capture_output=True, text=True, check=True
    )
    kinds = {document["kind"] for document in yaml.safe_load_all(built.stdout)}
    assert kinds == {document["kind"] for document in objects()}
