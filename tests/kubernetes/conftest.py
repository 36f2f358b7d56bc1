"""A stand-in for the API server, and a kubeconfig that leads to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from drivetrain.launch.job import Job
from tests.kubernetes.jobs import CPU_JOB, changed
from tests.kubernetes.stand_in import StandIn, stand_in


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
