"""The sinks on their real libraries: an MLflow store, an HTTP endpoint, W&B's offline files."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest

from drivetrain.core.errors import EnvironmentProblem
from drivetrain.record import RunDirectory, sinks
from drivetrain.record.sinks import PrometheusSink, choose_sinks, make_sink, metric_name
from drivetrain.record.system import Gpus, NodeUsage, SystemWatch

RUN_YAML = """
config:
  seed: 3
  optimization: {learning_rate: 0.01, max_grad_norm: null}
  record: {prometheus: {port: 0, host: 127.0.0.1}}
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.at(tmp_path / "runs" / "digits")
    run.write_run_yaml(RUN_YAML)
    run.begin_attempt(1, {"host": "here"})
    return run


def in_a_process(code: str, *words: str) -> str:
    """Heavy libraries leave threads and files open; not in this process."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


TWO_LIVES = """
import sys, time
from pathlib import Path
from drivetrain.record import Recorder, RunDirectory, recorder as outbox
from drivetrain.record.sinks import make_sink
outbox.PATIENCE_S = 170  # a busy machine takes long to import a large library
run = RunDirectory(Path(sys.argv[1]))
for attempt in (1, 2):
    try:
        with Recorder(run.events(0), [make_sink(sys.argv[2], run)], attempt) as recorder:
            for step in range(5 * attempt, 5 * attempt + 5):
                recorder.scalars(step, {"train/loss": 1.0 / step, "bad": float("nan")})
            if attempt == 1:
                raise ValueError("an attempt that fails")
    except ValueError:
        pass
"""

READ_MLFLOW = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=sys.argv[1])
experiment = client.get_experiment_by_name("drivetrain")
runs = client.search_runs([experiment.experiment_id])
history = client.get_metric_history(runs[0].info.run_id, "train/loss")
print(json.dumps({
    "runs": [run.info.run_name for run in runs],
    "status": runs[0].info.status,
    "params": runs[0].data.params,
    "metrics": sorted(runs[0].data.metrics),
    "steps": [point.step for point in history],
    "artifacts": sorted(f.path for f in client.list_artifacts(runs[0].info.run_id)),
}))
"""


@pytest.mark.slow
def test_mlflow_has_one_run_for_all_attempts(run: RunDirectory) -> None:
    if find_spec("mlflow") is None:  # asked, not imported: it leaves threads behind
        pytest.skip("pip install 'drivetrain[mlflow]'")
    in_a_process(TWO_LIVES, str(run.path), "mlflow")
    seen = json.loads(in_a_process(READ_MLFLOW, f"sqlite:///{run.path.parent}/mlflow.db"))
    assert seen["runs"] == ["digits"]
    assert seen["status"] == "FINISHED"
    assert seen["params"]["optimization.learning_rate"] == "0.01"
    assert "optimization.max_grad_norm" not in seen["params"]
    assert seen["metrics"] == ["train/loss"]
    assert sorted(seen["steps"]) == list(range(5, 15))
    assert seen["artifacts"] == ["attempts", "run.yaml"]


@pytest.mark.slow
@pytest.mark.long
def test_wandb_writes_offline_into_the_run_and_goes_on_with_the_same_id(run: RunDirectory) -> None:
    pytest.importorskip("wandb")
    in_a_process(TWO_LIVES, str(run.path), "wandb")
    run_id = json.loads((run.path / "wandb.json").read_text())["id"]
    written = list(run.path.glob(f"wandb/offline-run-*/run-{run_id}.wandb"))
    assert len(written) == 2
    assert all(path.stat().st_size > 0 for path in written)


def scrape(run: RunDirectory) -> str:
    (note,) = (run.path.parent / "prometheus").glob("*.json")
    (target,) = json.loads(note.read_text())
    port = target["targets"][0].rpartition(":")[2]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text: str = answer.read().decode()
    return text


def test_prometheus_sees_the_newest_values_and_finds_the_endpoint_by_itself(
    run: RunDirectory,
) -> None:
    sink = PrometheusSink(run)
    sink.write([(1, 5.0, {"train/loss": 2.5}), (2, 6.0, {"train/loss": math.nan})])
    sink.write([(3, 7.0, {"system/gpu_1_power_usage_watts": 300.0})])
    text = scrape(run)
    assert 'drivetrain_train_loss{host="' in text
    assert 'run="digits"} NaN' in text
    assert 'gpu="1"' in text
    assert " 3.0\n" in text
    sink.close("finished")
    assert not list((run.path.parent / "prometheus").glob("*.json"))
    assert metric_name("system/gpu_1_power_usage_watts") == (
        "drivetrain_system_gpu_power_usage_watts",
        {"gpu": "1"},
    )


def test_two_runs_on_one_node_have_two_ports(run: RunDirectory, tmp_path: Path) -> None:
    first = PrometheusSink(run)
    port = first._server.server_port
    other = RunDirectory.at(tmp_path / "runs" / "other")
    other.write_run_yaml(f"config: {{record: {{prometheus: {{port: {port}, host: 127.0.0.1}}}}}}")
    second = PrometheusSink(other)
    assert second._server.server_port not in (0, port)
    first.close("finished")
    second.close("finished")


def test_only_rank_0_looks_up_how_to_install_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # noqa: ARG005

    def command(extra: str) -> str:
        asked.append(extra)
        return "pip …"

    monkeypatch.setattr(sinks, "install_command", command)
    assert choose_sinks(is_main=False) == ((), "tensorboard is not installed")
    assert asked == []
    assert choose_sinks(is_main=True) == ((), "tensorboard is not installed (pip …)")


@pytest.mark.parametrize("name", ["mlflow", "prometheus", "wandb"])
def test_a_library_that_is_not_there_names_its_extra(
    run: RunDirectory, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = {"prometheus": "prometheus_client"}.get(name, name)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(EnvironmentProblem, match=rf"pip install .*\[{name}\]'"):
        make_sink(name, run)


UNREACHABLE = """
import sys, time, warnings
from pathlib import Path
from drivetrain.record import Recorder, recorder as outbox

outbox.PATIENCE_S = 2

class Unreachable:  # a tracking server that never answers, not even to a goodbye
    name, every_s = "unreachable", 0.01
    def write(self, batch):
        time.sleep(60)
    def close(self, outcome):
        time.sleep(60)

recorder = Recorder(Path(sys.argv[1]), [Unreachable()])
began_s = time.perf_counter()
for step in range(1000):
    recorder.scalars(step, {"x": 1.0})
handed_over_s = time.perf_counter() - began_s
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    recorder.close()
print(handed_over_s, time.perf_counter() - began_s, caught[0].message)
"""


def test_a_sink_that_never_answers_holds_up_neither_a_step_nor_the_end(tmp_path: Path) -> None:
    said = in_a_process(UNREACHABLE, str(tmp_path / "e.jsonl")).split(maxsplit=2)
    assert float(said[0]) < 0.5
    assert 2 <= float(said[1]) < 10
    assert said[2].startswith("sink unreachable: still busy after 2 s; gave up")
    assert len((tmp_path / "e.jsonl").read_text().splitlines()) == 1000


def test_what_the_node_does_is_shown_to_the_sinks(tmp_path: Path) -> None:
    node = NodeUsage()
    sum(i * i for i in range(200_000))
    seen = node.look()
    assert 0 <= seen["system/cpu_utilization_percentage"] <= 100
    assert 0 < seen["system/system_memory_usage_percentage"] < 100
    assert seen["system/process_memory_usage_megabytes"] > 10
    assert seen["system/network_receive_megabytes_per_sec"] >= 0
    assert Gpus().look() == {}  # none on the machines that run this test
    shown: list[dict[str, float]] = []
    watch = SystemWatch(0.05, lambda values: shown.append(dict(values)))
    time.sleep(0.4)
    watch.close()
    assert shown
    assert shown[0].keys() == seen.keys()
