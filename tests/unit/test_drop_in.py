"""The drop-in trainers' settings in Drivetrain's words, and the small names beside them."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from drivetrain import (
    ConfigError,
    DeepSpeedConfig,
    DistributedConfig,
    GradientCompression,
    LRSchedule,
    PerformanceMonitor,
    PyTorchDDPTrainer,
    RayTrainer,
    WorkerFailure,
    load_config,
    notebook_launcher,
)
from drivetrain.cluster.environments import Identity, detect
from drivetrain.compat.settings import from_search


def data() -> TensorDataset:
    inputs = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def trainer(folder: Path, **settings: Any) -> PyTorchDDPTrainer:
    given = {"num_gpus": 1, "batch_size": 10, "tensorboard": False, "tensorboard_dir": str(folder)}
    return PyTorchDDPTrainer(nn.Linear(4, 2), **{**given, **settings})


def test_epochs_are_counted_in_steps() -> None:
    config = DistributedConfig(checkpoint_frequency=10, warmup_epochs=5, checkpoint_dir="kept")
    said = config.run_config(2, 2, steps_per_epoch=7)
    assert said["checkpoint"] == {"every_steps": 70, "directory": "kept", "resume_from": None}
    assert said["optimization"]["warmup_steps"] == 35
    by_steps = DistributedConfig(checkpoint_every_n_steps=3, warmup_steps=4).run_config(2)
    assert by_steps["checkpoint"]["every_steps"] == 3
    assert by_steps["optimization"]["warmup_steps"] == 4
    with pytest.raises(
        ConfigError, match="checkpoint_frequency = 1: the length of an epoch .* is not"
    ):
        DistributedConfig(checkpoint_frequency=1).run_config(2)
    with pytest.raises(ConfigError, match="checkpoint_every_n_steps is set as well"):
        DistributedConfig(checkpoint_frequency=1, checkpoint_every_n_steps=5)


class Stream(IterableDataset[int]):
    """Of unknown length."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


def test_a_checkpoint_each_second_epoch(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    trainer(tmp_path, epochs=4, checkpoint_frequency=2, checkpoint_dir=str(kept)).fit(data())
    folders = [each.name for each in kept.iterdir() if each.is_dir()]
    steps = sorted(int(found[0]) for name in folders if (found := re.findall(r"\d+", name)))
    assert steps == [10, 20], folders  # 5 steps an epoch
    with pytest.raises(ConfigError, match="set checkpoint_every_n_steps"):
        trainer(tmp_path, checkpoint_frequency=2).fit(DataLoader(Stream()))


def test_a_scheduler_goes_by_epochs_unless_it_says_otherwise(tmp_path: Path) -> None:
    def rates(every: str | None) -> list[float]:
        model = nn.Linear(4, 2)
        schedule: Any = StepLR(torch.optim.SGD(model.parameters(), lr=1.0), 1, gamma=0.5)
        if every:
            schedule = LRSchedule(schedule, every="step")
        given = {"num_gpus": 1, "batch_size": 25, "epochs": 2, "tensorboard_dir": str(tmp_path)}
        optimizer = schedule.scheduler.optimizer if every else None
        made = PyTorchDDPTrainer(model, None, None, optimizer, schedule, tensorboard=False, **given)
        return [step.learning_rate for step in made.fit(data()).steps]

    assert rates(None) == [1.0, 1.0, 0.5, 0.5]
    assert rates("step") == [1.0, 0.5, 0.25, 0.125]
    with pytest.raises(ConfigError, match="warmup_steps = 3: the scheduler sets the rate"):
        optimizer = torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=1.0)
        PyTorchDDPTrainer(nn.Linear(4, 2), scheduler=StepLR(optimizer, 1), warmup_steps=3)


def test_the_rate_grows_with_the_ranks() -> None:
    said = DistributedConfig(learning_rate_scaling="linear", batch_size=8).run_config(4)
    assert said["global_batch_size"] == 32
    assert said["optimization"]["learning_rate_scaling"] == "linear"
    assert said["optimization"]["base_batch_size"] == 8


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("FULL_SHARD", {"strategy": "fsdp", "fsdp": {"reshard_after_forward": "auto"}}),
        ("SHARD_GRAD_OP", {"strategy": "fsdp", "fsdp": {"reshard_after_forward": False}}),
        ("HYBRID_SHARD", {"strategy": "fsdp", "dp_shard": 4, "dp_replicate": 2}),
        ("NO_SHARD", {"strategy": "ddp"}),
    ],
)
def test_torchs_sharding_strategies(name: str, expected: dict[str, Any]) -> None:
    from torch.distributed.fsdp import ShardingStrategy

    for given in (name, ShardingStrategy[name]):
        said = DistributedConfig(sharding_strategy=given).run_config(8, 4)["parallel"]
        assert {key: said.get(key) for key in expected} == expected
    with pytest.raises(ConfigError, match="use FULL_SHARD or SHARD_GRAD_OP or HYBRID_SHARD or NO"):
        DistributedConfig(sharding_strategy="ZERO")
    with pytest.raises(ConfigError, match="is an FSDP setting, but this run uses another backend"):
        DistributedConfig(sharding_strategy=name, zero_stage=2)


def test_what_a_search_has_drawn() -> None:
    made = RayTrainer(nn.Linear(4, 2), {"hidden_size": 8, "lr": 0.1, "batch_size": 4})
    assert (made.config.learning_rate, made.config.batch_size) == (0.1, 4)
    assert made.config.num_ranks == 1
    with pytest.raises(ConfigError, match="batchsize = 4: unknown .* batch_size"):
        from_search({"batchsize": 4})
    with pytest.raises(ConfigError, match="config = 2: is not a config; write num_workers=2"):
        RayTrainer(nn.Linear(4, 2), 2)  # type: ignore[arg-type]


def test_deepspeeds_settings_as_keywords(tmp_path: Path) -> None:
    config = DeepSpeedConfig(zero_optimization={"stage": 3})
    said = DistributedConfig(deepspeed_config=config).run_config(2)["parallel"]
    assert said["strategy"] == "deepspeed"
    assert said["deepspeed"]["config"] == {"zero_optimization": {"stage": 3}}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"gradient_clipping": 1.0, "zero_optimization": {"stage": 1}}))
    assert DeepSpeedConfig(file, zero_optimization={"stage": 2}) == {
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
    }
    with pytest.raises(ConfigError, match="give a JSON file"):
        DeepSpeedConfig(tmp_path / "none.json")


@pytest.mark.parametrize(
    "words",
    [
        ["--deepspeed_config", "ds.json"],
        ["--deepspeed_config=ds.json"],
        ["--deepspeed", "ds.json"],
        ["--deepspeed", "--deepspeed_config", "ds.json"],
        ["--local_rank=0", "--deepspeed_config", "ds.json"],
    ],
)
def test_deepspeeds_flags_are_the_configs(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["train.py", *words, "max_steps=3", "global_batch_size=4"])
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "train.py", raising=False)
    config = load_config().config
    assert config.parallel.strategy == "deepspeed"
    assert str(config.parallel.options.model_dump()["config"]) == "ds.json"
    assert config.max_steps == 3


def test_a_process_of_the_deepspeed_command() -> None:
    # as deepspeed 0.19.8's launcher/launch.py sets them, on the second of two nodes
    said = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_SIZE": "2"}
    said |= {
        "CROSS_RANK": "1",
        "CROSS_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }
    assert detect(said) == Identity("deepspeed", 3, 1, 4, 2, 1, "10.0.0.1", 29500)


def test_variables_by_hand() -> None:
    said = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "WORLD_SIZE": "4"}
    identity = detect({**said, "RANK": "2", "LOCAL_RANK": "2"})
    assert (identity.rank, identity.local_rank, identity.world_size) == (2, 2, 4)
    assert (identity.main_address, identity.main_port) == ("localhost", 29500)


def test_the_largest_gradients_alone() -> None:
    gradient = torch.tensor([[0.1, -5.0], [3.0, 0.2]])
    few = GradientCompression(0.5).compress_gradients([gradient, None])
    assert few[1] is None
    assert torch.equal(few[0], torch.tensor([[0.0, -5.0], [3.0, 0.0]]))  # type: ignore[arg-type]
    said = DistributedConfig(compression=GradientCompression(0.5)).run_config(2)["communication"]
    assert said == {"compression": "topk", "topk": {"ratio": 0.5}}
    assert DistributedConfig(compression="fp16").run_config(2)["communication"] == {
        "compression": "fp16"
    }
    with pytest.raises(ConfigError, match="compression_ratio = 0: must be above 0"):
        GradientCompression(0)


class Counting:
    """What a document's own trainer looks like."""

    steps = 0

    def train_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        self.steps += len(inputs) == len(targets)
        return 0.5


def test_a_monitor_times_steps(caplog: pytest.LogCaptureFixture) -> None:
    monitor, counting = PerformanceMonitor(), Counting()
    with caplog.at_level(logging.INFO, "drivetrain"):
        monitor.monitor_training(counting, DataLoader(data(), batch_size=2), num_steps=12)
    assert counting.steps == 12
    assert 0 <= monitor.timings["forward_backward"] <= monitor.timings["total_training"]
    assert [line for line in caplog.messages if line.startswith("step 10  loss 0.5")]
    with pytest.raises(ConfigError, match="end_timer = epoch: was not started; start_timer"):
        monitor.end_timer("epoch")


NOTEBOOK = """
import os, sys, torch, torch.distributed as dist
from drivetrain import WorkerFailure, notebook_launcher
torch.ones(500, 500) @ torch.ones(500, 500)  # OpenMP's threads are there before the fork

def train(scale):
    dist.init_process_group("gloo")
    total = torch.tensor([scale * (dist.get_rank() + 1)])
    dist.all_reduce(total)
    model = torch.nn.Linear(500, 500)
    model(torch.ones(500, 500)).sum().backward()
    sys.stdout.write(f"rank {dist.get_rank()} of {os.environ['WORLD_SIZE']}: {total.item()}\\n")

def fail():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("rank 1 has had enough")
    dist.barrier()

notebook_launcher(train, (2.0,), num_processes=2)
try:
    notebook_launcher(fail, num_processes=2)
except WorkerFailure as error:
    print("FAILED", str(error).splitlines()[0], "...", str(error).splitlines()[-1])
assert "RANK" not in os.environ and not dist.is_initialized()
"""


@pytest.mark.slow
@pytest.mark.long
def test_a_function_without_a_file_on_two_ranks(tmp_path: Path) -> None:
    """`python -c` has no file to start again, as a notebook has none."""
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines[1:] == ["rank 0 of 2: 6.0", "rank 1 of 2: 6.0"]
    assert lines[0] == "FAILED rank 1 of 2 failed: ... ValueError: rank 1 has had enough"


def test_one_process_is_this_one() -> None:
    seen: list[int] = []
    notebook_launcher(seen.append, args=(7,), num_processes=1)
    assert seen == [7]
    with pytest.raises(ConfigError, match="args = 2: .*; write num_processes=2"):
        notebook_launcher(print, 2)  # type: ignore[arg-type]
    assert WorkerFailure.exit_code == 5


CELLS = (
    "import torch\nfrom torch import nn\nfrom torch.utils.data import TensorDataset\n"
    "from drivetrain import PyTorchDDPTrainer, notebook_launcher\n"
    "torch.ones(300, 300) @ torch.ones(300, 300)",
    "def train(epochs):\n"
    "    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))\n"
    "    data = TensorDataset(x, (x.sum(1) > 0).long())\n"
    "    settings = {'batch_size': 4, 'epochs': epochs, 'tensorboard': False}\n"
    "    made = PyTorchDDPTrainer(nn.Linear(4, 2), **settings)\n"
    "    print('steps', len(made.fit(data).steps))",
    "notebook_launcher(train, args=(3,), num_processes=2)",
    "def fail():\n    raise ValueError('a cell has failed')\n"
    "notebook_launcher(fail, num_processes=2)",
)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("nbclient") is None, reason="pip install nbclient ipykernel")
def test_a_real_notebook(tmp_path: Path) -> None:
    import nbclient
    import nbformat

    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    resources = {"metadata": {"path": str(tmp_path)}}
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="a cell has failed"):
        nbclient.NotebookClient(made, timeout=240, resources=resources).execute()
    shown = "".join(each.get("text", "") for each in made.cells[2].outputs)
    assert "micro-batch 4 × accumulation 1 × 2 ranks" in shown
    assert "step 12/12" in shown  # 32 samples, 4 on each of 2 ranks, 3 epochs
