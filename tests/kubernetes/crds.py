"""The operators' own schemas, made strict: a key they do not know is an error.

    python -m tests.kubernetes.crds FOLDER     # writes the trimmed schemas of a folder of CRDs

Trimmed to the version that is rendered, without descriptions; the rules are untouched.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "golden" / "crds"
# kind → the file upstream, and the version that is rendered
SOURCES = {
    "JobSet": ("jobset.x-k8s.io_jobsets.yaml", "v1alpha2"),
    "TrainJob": ("trainer.kubeflow.org_trainjobs.yaml", "v1alpha1"),
    "TrainingRuntime": ("trainer.kubeflow.org_trainingruntimes.yaml", "v1alpha1"),
    "RayJob": ("ray.io_rayjobs.yaml", "v1"),
}


@cache
def schema(kind: str) -> dict[str, Any]:
    """Of a kind, unknown keys refused."""
    loaded = json.loads((FOLDER / f"{kind}.json").read_text())
    found: dict[str, Any] = strict(loaded)
    found["properties"]["metadata"] = {"type": "object"}
    return found


def strict(node: Any) -> Any:
    """As the API server does it with strict field validation."""
    if isinstance(node, list):
        return [strict(each) for each in node]
    if not isinstance(node, dict):
        return node
    made = {key: strict(value) for key, value in node.items()}
    if made.get("x-kubernetes-int-or-string") is True:
        made = {"anyOf": [{"type": "integer"}, {"type": "string"}], **_without(made, "type")}
    is_open = "additionalProperties" in made or made.get("x-kubernetes-preserve-unknown-fields")
    # a schema, not a property that happens to have such a name
    if made.get("type") == "object" and "properties" in made and not is_open:
        made["additionalProperties"] = False
    return made


def _without(node: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in node.items() if name != key}


def trimmed(node: Any, in_properties: bool = False) -> Any:
    """Without descriptions, which are nine tenths of a CRD."""
    if isinstance(node, list):
        return [trimmed(each) for each in node]
    if not isinstance(node, dict):
        return node
    return {
        key: trimmed(value, key == "properties" and not in_properties)
        for key, value in node.items()
        if in_properties or key != "description"
    }


def main(folder: Path) -> None:
    import yaml

    for kind, (file, version) in SOURCES.items():
        content = yaml.load((folder / file).read_text(), Loader=yaml.CSafeLoader)
        versions = {each["name"]: each for each in content["spec"]["versions"]}
        found = trimmed(versions[version]["schema"]["openAPIV3Schema"])
        found["properties"].pop("status", None)
        text = json.dumps(found, separators=(",", ":"), sort_keys=True)
        (FOLDER / f"{kind}.json").write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
