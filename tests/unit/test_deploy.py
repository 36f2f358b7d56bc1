"""What stands in deploy/, held against the real tools and against what a run really shows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from drivetrain.record.sinks import metric_name
from drivetrain.record.step_file import SECONDS

DEPLOY = Path(__file__).parents[2] / "deploy"
METRIC = re.compile(r"drivetrain_\w+")
SHOWN = [
    *("train/step", "train/loss", "train/learning_rate", "train/grad_norm", "val/loss"),
    *("throughput/samples_per_sec", "throughput/tokens_per_sec", "throughput/device/mfu"),
    *("time/step_s", *(f"time/{name}" for name in SECONDS), "last_report_timestamp_seconds"),
    *(f"system/{n}" for n in ("cpu_utilization_percentage", "system_memory_usage_percentage")),
    *(f"system/network_{way}_megabytes_per_sec" for way in ("receive", "transmit")),
    *("system/gpu_0_utilization_percentage", "system/gpu_0_ecc_errors"),
]


def expressions() -> list[str]:
    dashboard = json.loads((DEPLOY / "grafana/drivetrain.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_dashboard_and_alerts_ask_for_what_a_run_shows() -> None:
    alerts = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
    rules = [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    asked = {name for expression in (*expressions(), *rules) for name in METRIC.findall(expression)}
    assert asked <= {metric_name(name)[0] for name in SHOWN}
    assert len(asked) > 15


def promtool(*words: str) -> None:
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (apt: prometheus)"
)


@needs_promtool
def test_prometheus_takes_the_config_and_the_rules() -> None:
    promtool("check", "config", str(DEPLOY / "prometheus/prometheus.yml"))
    promtool("check", "rules", str(DEPLOY / "prometheus/alerts.yml"))


@needs_promtool
def test_alerts_fire_when_they_should_and_not_before() -> None:
    promtool("test", "rules", str(DEPLOY / "prometheus/alerts_test.yml"))


@needs_promtool
def test_every_expression_of_the_dashboard_is_one(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{index}", "expr": expression.replace("$run", "gpt")}
        for index, expression in enumerate(expressions())
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", str(path))
