"""Horovod: the same numbers as one process, under horovodrun and under our own launcher."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.compat.horovod import HorovodTrainer
from drivetrain.core.errors import ConfigError, EnvironmentProblem
from drivetrain.strategies.horovod.rendezvous import load_horovod
from drivetrain.testing import run_ranks
from tests.ranks.training import assert_same_training, largest_deviation, train_gpt, train_layouts

SCRIPTS, EXAMPLES = Path(__file__).parents[1] / "scripts", Path(__file__).parents[2] / "examples"
HOROVOD: dict[str, Any] = {"strategy": "horovod"}
FP16: dict[str, Any] = {"strategy": "horovod", "horovod": {"compression": "fp16"}}
STEPS = 30

built = pytest.mark.skipif(find_spec("horovod") is None, reason="`make horovod` builds it")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process, which needs no Horovod."""
    torch.set_num_threads(1)
    return train_gpt(str(tmp_path_factory.mktemp("reference")), max_steps=STEPS)[0]


def train(folder: str, layouts: dict[str, Any]) -> dict[str, list[float]]:
    losses = train_layouts(folder, layouts, max_steps=STEPS)
    load_horovod().shutdown()  # at the end of a script it does so by itself
    return losses


@built
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_horovod_trains_what_one_process_trains(
    world_size: int, reference: list[float], tmp_path: Path
) -> None:
    layouts = {"plain": HOROVOD, "fp16": FP16}
    for by_name in run_ranks(train, world_size, 500, args=(str(tmp_path), layouts)):
        assert_same_training(by_name["plain"], reference)
        plain, fp16 = (largest_deviation(by_name[n], reference) for n in ("plain", "fp16"))
        print(f"{world_size} ranks: {plain:.1e}, with fp16 {fp16:.1e}")
        # fp16 keeps 11 bits of each gradient: another training, though a close one
        assert 5 * plain < fp16 < 5e-3


def horovodrun(*words: str, cwd: Path) -> str:
    runner = Path(str(load_horovod().__file__)).parents[2] / "bin" / "horovodrun"
    command = [str(runner)] if runner.exists() else ["horovodrun"]
    result = subprocess.run(
        [*command, "-np", "2", "--gloo", sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@built
@pytest.mark.slow
def test_the_drop_in_trainer_under_horovodrun(tmp_path: Path) -> None:
    output = horovodrun(str(SCRIPTS / "horovod_drop_in.py"), str(tmp_path), cwd=tmp_path)
    lines = [line.split("RESULT ")[1] for line in output.splitlines() if "RESULT " in line]
    results = sorted(json.loads(line) for line in lines)
    # 64 samples, 8 on each of 2 ranks, 3 epochs: 12 steps; the mean of 0 and 1; the same weights
    assert [result[:3] for result in results] == [[0, 12, 0.5], [1, 12, 0.5]]
    assert results[0][3] == results[1][3]


@built
@pytest.mark.slow
def test_horovodrun_and_our_launcher_show_the_same_loss(tmp_path: Path) -> None:
    words = [str(EXAMPLES / "digits.py"), "max_steps=20", "num_train_epochs=null"]
    words += ["parallel.strategy=horovod", "record.progress=plain"]
    under_horovodrun = horovodrun(*words, cwd=tmp_path)
    ours = [sys.executable, "-m", "drivetrain", "train", "--nproc-per-node", "2", *words]
    under_ours = subprocess.run(
        ours, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=True
    ).stdout
    assert last_loss(under_horovodrun) == last_loss(under_ours)


def last_loss(output: str) -> str:
    (line,) = [line for line in output.splitlines() if "step 20/20" in line]
    return line.split("loss ")[1].split()[0]


@pytest.mark.skipif(find_spec("horovod") is not None, reason="it is built")
def test_without_it_the_way_to_get_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="horovod: is not installed; `make horovod`"):
        train_gpt(str(tmp_path), parallel=HOROVOD)


def test_the_drop_in_trainer_knows_the_compressors() -> None:
    class FP16Compressor:
        """By its name, as in hvd.Compression."""

    for given in ("fp16", FP16Compressor):
        trainer = HorovodTrainer(torch.nn.Linear(2, 2), compression=given)
        said = trainer.config.run_config(2)["parallel"]
        assert said["strategy"] == "horovod"
        assert said["horovod"] == {"compression": "fp16"}
    with pytest.raises(ConfigError, match="compression = int8: not supported"):
        HorovodTrainer(torch.nn.Linear(2, 2), compression="int8")
