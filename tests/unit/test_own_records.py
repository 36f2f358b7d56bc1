"""Numbers, texts and images of the script's own, in every sink that takes them."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import ConfigError, Hook, Task, Trainer, open_run, prepare
from drivetrain.train.own_records import as_pixels

DATA = TensorDataset(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
RED = torch.stack([torch.ones(5, 7), torch.zeros(5, 7), torch.zeros(5, 7)])


def loss(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]).square().mean()


def settings(output_dir: Path, *sinks: str) -> dict[str, Any]:
    return {
        "output_dir": str(output_dir),
        "global_batch_size": 4,
        "micro_batch_size": 4,
        "max_steps": 2,
        "record": {"progress": "plain", "sinks": list(sinks)},
    }


class Logs(Hook):
    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        trainer.log({"mine/step": step, "mine/size": torch.tensor(2.5)})
        trainer.log_text("mine/said", f"step {step} is <done>")
        trainer.log_image("mine/seen", RED)


def trained(output_dir: Path, *sinks: str) -> Path:
    task = Task(lambda: nn.Linear(4, 1), loss)
    history = Trainer(task, settings(output_dir, *sinks), [Logs()]).fit(DATA)
    assert history.run_dir is not None
    return history.run_dir


def test_the_runs_events_have_numbers_and_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = open_run(trained(tmp_path))
    assert list(run.scalars()["mine/step"].values) == [1.0, 2.0]
    assert list(run.scalars()["mine/size"].values) == [2.5, 2.5]
    said = [event.values["text"] for event in run.events(0) if event.name == "text"]
    assert said == ["step 1 is <done>", "step 2 is <done>"]
    assert capsys.readouterr().out.count("no sink of this run takes images") == 1


def test_tensorboard_shows_all_of_it(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained(tmp_path, "tensorboard") / "tensorboard"))
    events.Reload()
    assert [point.value for point in events.Scalars("mine/step")] == [1.0, 2.0]
    (text,) = [tag for tag in events.Tags()["tensors"] if tag.startswith("mine/said")]
    assert events.Tensors(text)[1].tensor_proto.string_val == [b"step 2 is <done>"]
    first = events.Images("mine/seen")[0]
    assert (first.step, first.width, first.height) == (1, 7, 5)


def test_jsonl_has_numbers_and_texts(tmp_path: Path) -> None:
    lines = (trained(tmp_path, "jsonl") / "scalars.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    said = [line["mine/said"] for line in found if "mine/said" in line]
    assert said == ["step 1 is <done>", "step 2 is <done>"]


IN_MLFLOW = """
import sys
from pathlib import Path
from mlflow import MlflowClient
from drivetrain.record import recorder as outbox
from tests.unit.test_own_records import trained

outbox.PATIENCE_S = 170  # a busy machine takes long to import MLflow and to create its store
folder = Path(sys.argv[1])
trained(folder, "mlflow")
client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
(run,) = client.search_runs([client.get_experiment_by_name("drivetrain").experiment_id])
for name in ("said", "seen"):
    print(*(file.path for file in client.list_artifacts(run.info.run_id, f"mine/{name}")))
"""


def test_mlflow_keeps_texts_and_images_as_files(tmp_path: Path) -> None:
    if find_spec("mlflow") is None:
        pytest.skip("pip install 'drivetrain[mlflow]'")
    # in a process of its own: MLflow leaves threads behind
    ended = subprocess.run(
        [sys.executable, "-c", IN_MLFLOW, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-2:] == [
        "mine/said/1.txt mine/said/2.txt",
        "mine/seen/1.png mine/seen/2.png",
    ]


def test_a_loop_of_ones_own_logs_too(tmp_path: Path) -> None:
    loop = prepare(lambda: nn.Linear(4, 1), None, DATA, settings(tmp_path))
    with pytest.raises(RuntimeError, match="call log\\(\\) inside"):
        loop.log({"early": 1})
    for step in loop.steps():
        for batch in step:
            loop.backward(loss(loop.model, batch))
        loop.step()
        loop.log({"mine": 3})
    assert loop.history.run_dir is not None
    assert list(open_run(loop.history.run_dir).scalars()["mine"].values) == [3.0, 3.0]


def test_outside_of_fit_nothing_is_lost_in_silence(tmp_path: Path) -> None:
    trainer = Trainer(Task(lambda: nn.Linear(4, 1), loss), settings(tmp_path))
    trainer.fit(DATA)
    with pytest.raises(RuntimeError, match="call log\\(\\) in a hook, while fit\\(\\) is training"):
        trainer.log({"late": 1})


@pytest.mark.parametrize(
    "image",
    [
        RED,
        (RED * 255).to(torch.uint8),
        np.moveaxis(RED.numpy(), 0, -1),
        (np.moveaxis(RED.numpy(), 0, -1) * 255).astype(np.uint8),
    ],
)
def test_an_image_is_the_same_however_it_is_kept(image: Any) -> None:
    pixels = as_pixels(image)
    assert pixels.shape == (5, 7, 3)
    assert pixels.dtype == np.uint8
    assert pixels[2, 3].tolist() == [255, 0, 0]


def test_grey_has_one_colour() -> None:
    assert as_pixels(torch.full((5, 7), 0.5))[0, 0].tolist() == [128] * 3
    assert as_pixels(np.zeros((5, 7)))[0, 0].tolist() == [0] * 3


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        (torch.zeros(5, 7, 3), "is not an image with 1, 3 or 4 channels"),
        (torch.zeros(7), "is not an image"),
        (RED * 2, "has values from 0 to 2; scale it"),
        (RED * float("nan"), "has values from nan to nan"),
    ],
)
def test_what_is_no_image_is_said(image: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        as_pixels(image)


def test_a_tensor_of_many_numbers_is_no_number(tmp_path: Path) -> None:
    class Wrong(Hook):
        def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
            trainer.log({"weights": torch.zeros(3)})

    with pytest.raises(ConfigError, match="is not a single number; log its mean"):
        Trainer(Task(lambda: nn.Linear(4, 1), loss), settings(tmp_path), [Wrong()]).fit(DATA)
