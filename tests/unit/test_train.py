from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
)

from drivetrain import (
    ConfigError,
    DistributedConfig,
    Hook,
    PyTorchDDPTrainer,
    Task,
    Total,
    Trainer,
)
from drivetrain.cluster.description import Cluster
from drivetrain.config.schema import Optimization
from drivetrain.core.errors import EnvironmentProblem, NonFiniteLoss
from drivetrain.data.keys import fold, turn_seed
from drivetrain.parallel.blocks import blocks_named, repeated_blocks
from drivetrain.parallel.layout import Layout
from drivetrain.record.reading import duration_s, open_run
from drivetrain.record.requests import ProfileRequest
from drivetrain.strategies.ddp import DDP
from drivetrain.strategies.ddp.strategy import DDPStrategy
from drivetrain.strategies.fsdp import FSDP
from drivetrain.strategies.fsdp.strategy import FSDPStrategy
from drivetrain.strategies.strategy import Profile
from drivetrain.train.history import EvaluationResult, StepMetrics
from drivetrain.train.keep_loop import prepare
from drivetrain.train.optimization.schedule import CurveRate, RateCurve, batch_size_factor
from drivetrain.train.watch.plan import PlanWatch
from drivetrain.train.watch.profiling import Profiling
from drivetrain.train.watch.requested import PLAN_VARIABLE

with_tensorboard = pytest.mark.skipif(
    find_spec("tensorboard") is None, reason="pip install 'drivetrain[tensorboard]'"
)


def data(length: int = 50) -> TensorDataset:
    x = torch.randn(length, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).long())


def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def task() -> Task:
    return Task(model=lambda: nn.Linear(4, 2), loss=mean_loss)


@pytest.fixture
def config(quiet: dict[str, Any]) -> dict[str, Any]:
    return {"global_batch_size": 8, "micro_batch_size": 4, "num_train_epochs": 2, **quiet}


class Listener(Hook):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        self.heard.append("fit start")

    def on_train_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        self.heard.append(f"epoch {epoch} start")

    def on_train_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        self.heard.append(f"epoch {epoch} end")

    def on_before_optimizer_step(self, trainer: Trainer, step: int) -> None:
        assert all(p.grad is not None for p in trainer.model.parameters())
        self.heard.append(f"step {step}")

    def on_validation_end(self, trainer: Trainer, result: EvaluationResult) -> None:
        self.heard.append(f"evaluated after {result.step}")

    def on_log(self, trainer: Trainer, metrics: Sequence[StepMetrics]) -> None:
        self.heard.append(f"log {[m.step for m in metrics]}")

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        self.heard.append(type(error).__name__)

    def on_fit_end(self, trainer: Trainer) -> None:
        self.heard.append("fit end")


def test_hooks_are_called_in_the_order_of_the_contract(config: dict[str, Any]) -> None:
    listener = Listener()
    config = {**config, "record": {**config["record"], "logging_steps": 2}}
    Trainer(task(), config, [listener]).fit(data(20), data(6))
    assert listener.heard == [
        "fit start",
        *["epoch 0 start", "step 1", "step 2", "log [1, 2]", "step 3", "log [3]"],
        "evaluated after 3",
        *["epoch 0 end", "epoch 1 start", "step 4", "log [4]", "step 5", "step 6", "log [5, 6]"],
        "evaluated after 6",
        *["epoch 1 end", "fit end"],
    ]


def test_a_command_may_ask_for_a_profile_and_for_a_plan_to_be_held(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ProfileRequest(str(tmp_path / "traces"), first_step=1, last_step=2)
    for name, value in request.environment().items():
        monkeypatch.setenv(name, value)
    plan = tmp_path / "plan.json"
    plan.write_text('{"plans": [{"step_s": 1e-3}]}')
    monkeypatch.setenv(PLAN_VARIABLE, str(plan))
    trainer = Trainer(task(), config)
    trainer.fit(data(20))
    assert [type(hook) for hook in trainer.hooks] == [Profiling, PlanWatch]
    assert request.trace(0).is_file()


def test_history_counts_every_sample(config: dict[str, Any]) -> None:
    history = Trainer(task(), config).fit(data(50))
    assert [metrics.num_samples for metrics in history.steps] == [8, 8, 8, 8, 8, 8, 2] * 2
    assert history.total_time > 0
    assert history.best_accuracy is None


def test_the_run_directory_holds_what_it_should(config: dict[str, Any]) -> None:
    trainer = Trainer(task(), {**config, "name": "mine", "micro_batch_size": "auto"})
    history = trainer.fit(data())
    assert history.run_dir is not None
    assert history.run_dir.name == "mine"
    run = yaml.safe_load((history.run_dir / "run.yaml").read_text())
    assert run["config"]["micro_batch_size"] == 8
    assert run["sources"]["micro_batch_size"].startswith("chosen: 8 samples over 1 rank")
    lines = (history.run_dir / "events/00000.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [e["name"] for e in events if e["kind"] == "span"] == ["start_up", "last_save"]
    steps = open_run(history.run_dir).steps(0)
    assert steps["step"].tolist() == list(range(1, 15))
    # laps follow each other: one ends where the next begins
    gaps_s = steps["start_s"][1:] - (steps["start_s"] + duration_s(steps))[:-1]
    assert np.all(np.abs(gaps_s) < 0.01)
    losses = {e["step"]: e["values"]["train/loss"] for e in events if e["kind"] == "scalars"}
    assert losses == {10: history.losses[9], 14: history.losses[13]}
    start = json.loads((history.run_dir / "attempts/0001/start.json").read_text())
    assert start["world_size"] == 1
    assert start["launcher"] == "none (one process)"
    weights = torch.load(history.run_dir / "checkpoints/weights.pt", weights_only=True)
    assert torch.equal(weights["weight"], trainer.model.state_dict()["weight"])


@with_tensorboard
def test_tensorboard_is_used_when_it_is_there(config: dict[str, Any]) -> None:
    trainer = Trainer(task(), {**config, "record": {"progress": "none"}})
    history = trainer.fit(data())
    assert history.run_dir is not None
    assert list(history.run_dir.glob("tensorboard/events*"))
    assert str(trainer.resolved.source("record.sinks")) == "chosen: tensorboard is installed"


def test_a_loss_that_is_no_number_stops_the_run_and_says_where(config: dict[str, Any]) -> None:
    def explode(model: nn.Module, batch: Any) -> torch.Tensor:
        return mean_loss(model, batch) * math.inf

    listener = Listener()
    with pytest.raises(NonFiniteLoss, match=r"train/loss = nan|inf at step 1"):
        Trainer(Task(model=lambda: nn.Linear(4, 2), loss=explode), config, [listener]).fit(data())
    assert listener.heard[-1] == "NonFiniteLoss"


class Augmented(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Draws noise from torch's and Python's streams, as augmentations do."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        import random

        return torch.randn(4) + random.random(), torch.tensor(index % 2)  # noqa: S311


def test_augmentation_does_not_depend_on_loader_processes(config: dict[str, Any]) -> None:
    alone = Trainer(task(), config).fit(Augmented())
    helped = Trainer(task(), {**config, "data": {"num_workers": 2}}).fit(Augmented())
    assert helped.losses == alone.losses
    other = Trainer(task(), {**config, "seed": 7}).fit(Augmented())
    assert other.losses != alone.losses


class SelfSplitting(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Splits itself among loader processes and draws noise, as torch's documentation shows."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker = torch.utils.data.get_worker_info()
        first, pace = (worker.id, worker.num_workers) if worker else (0, 1)
        for index in range(first, 30, pace):
            yield torch.randn(4), torch.tensor(index % 2)


def test_a_stream_is_read_once_and_alike_in_any_number_of_processes(
    config: dict[str, Any],
) -> None:
    alone = Trainer(task(), config).fit(SelfSplitting())
    helped = Trainer(task(), {**config, "data": {"num_workers": 2}}).fit(SelfSplitting())
    assert [metrics.num_samples for metrics in helped.steps] == [8, 8, 8, 6] * 2
    assert helped.losses == alone.losses


def test_a_schedule_needs_an_end(config: dict[str, Any]) -> None:
    falling = {**config, "optimization": {"lr_scheduler_type": "cosine"}}
    with pytest.raises(ConfigError, match="cosine: depends on the end of the run"):
        Trainer(task(), falling).fit(SelfSplitting())


def test_a_streams_epochs_end_with_an_evaluation(config: dict[str, Any]) -> None:
    history = Trainer(task(), config).fit(SelfSplitting(), data())
    assert [result.step for result in history.evaluations] == [4, 8]


def test_a_loss_that_changes_its_kind_is_refused(config: dict[str, Any]) -> None:
    for first in (1, 4):  # in the first step already, where nothing is known yet, and later
        steps = iter(range(100))

        def fickle(model: nn.Module, batch: Any) -> torch.Tensor | Total:
            mean = mean_loss(model, batch)
            return mean if next(steps) < first else Total(mean, 1)  # noqa: B023 - used at once

        with pytest.raises(ConfigError, match="loss: is a mean for some batches and a Total"):
            Trainer(Task(model=lambda: nn.Linear(4, 2), loss=fickle), config).fit(data())


def test_blocks_are_found_inside_nested_lists() -> None:
    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList(
                nn.ModuleList(nn.Linear(2, 2) for _ in range(2)) for _ in range(3)
            )
            self.head = nn.Sequential(nn.Linear(2, 2))

    blocks = repeated_blocks(Stages())
    assert len(blocks) == 6
    assert all(isinstance(block, nn.Linear) for block in blocks)
    with pytest.raises(ConfigError, match="shard_modules = Conv2d: the model has no module of"):
        blocks_named(Stages(), ["Conv2d", "Linear"], "shard_modules")
    model = Stages()
    named = blocks_named(model, ["stages.1.0", "Sequential"], "shard_modules")
    assert named == [model.head, model.get_submodule("stages.1.0")]  # from the end


def test_a_given_optimizer_follows_wrapped_blocks(config: dict[str, Any]) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recompute = {**config, "memory": {"activation_checkpointing": "full"}, "max_steps": 2}
    loop = prepare(model, optimizer, data(), recompute)
    for step in loop.steps():
        for x, y in step:
            loop.backward(F.cross_entropy(loop.model(x), y))
        loop.step()
    assert len(loop.history.steps) == 2


def test_an_empty_or_strange_dataset_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="data: has no samples"):
        Trainer(task(), config).fit(data(0))
    with pytest.raises(ConfigError, match="neither a dataset nor"):
        Trainer(task(), config).fit(3)


def test_validation_data_that_can_be_read_once_only_is_refused(config: dict[str, Any]) -> None:
    samples = data(5)
    with pytest.raises(ConfigError, match=r"val = generator: can be read only once"):
        Trainer(task(), config).fit(data(), (samples[i] for i in range(5)))
    with pytest.raises(ConfigError, match="val: has no samples"):
        Trainer(task(), config).fit(data(), data(0))


class OnePass(IterableDataset[tuple[torch.Tensor, ...]]):
    """Forgets to begin anew."""

    def __init__(self) -> None:
        self.rest = iter([data(5)[i] for i in range(5)])

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        return self.rest


def test_an_evaluation_of_no_samples_ends_the_run(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"val: has no samples at step 14"):
        Trainer(task(), config).fit(data(), OnePass())
    loop = prepare(lambda: nn.Linear(4, 2), None, data(), config)
    val = (data(5)[i] for i in range(5))

    def metrics(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": mean_loss(model, batch)}

    assert loop.evaluate(val, metrics).num_samples == 5
    with pytest.raises(ConfigError, match=r"val: has no samples at step 0"):
        loop.evaluate(val, metrics)


def test_torch_compile_is_a_switch(config: dict[str, Any]) -> None:
    plain = Trainer(task(), config).fit(data())
    compiled = Trainer(task(), {**config, "compile": {"enabled": True, "backend": "eager"}})
    assert compiled.fit(data()).losses == pytest.approx(plain.losses, rel=1e-6)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1.0, 1.0, 1 - 0.9 * 0.146447, 0.55, 1 - 0.9 * 0.853553]),
    ],
)
def test_schedules(shape: str, expected: list[float]) -> None:
    schedule = RateCurve(shape, warmup_steps=2, total_steps=6, min_ratio=0.1)
    assert [schedule.factor(step) for step in range(6)] == pytest.approx(expected, abs=1e-5)


def test_each_group_keeps_its_own_peak() -> None:
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": 1.0}, {"params": [model.bias], "lr": 0.1}]
    optimizer = torch.optim.SGD(groups)
    rate = CurveRate(optimizer, RateCurve("linear", 0, 4, 0.0), scale=2.0)
    rate.before_step(2)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1.0, 0.1])


def test_a_torch_scheduler_on_the_optimizer_is_refused(config: dict[str, Any]) -> None:
    """Nobody would step it: its first factor would be the rate of the whole run."""
    refusal = r"optimizer = SGD: a torch LR scheduler .*Task\(schedule=.*prepare\(…, scheduler=…\)"

    def scheduled(parameters: Any, optimization: Optimization) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1)
        return optimizer

    with pytest.raises(ConfigError, match=refusal):
        Trainer(replace(task(), optimizer=scheduled), config).fit(data())
    model = nn.Linear(4, 2)
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(given, 1)
    with pytest.raises(ConfigError, match=refusal):
        prepare(model, given, data(), config)


def test_a_torch_scheduler_made_after_prepare_is_refused_at_the_first_step(
    config: dict[str, Any],
) -> None:
    loop = prepare(lambda: nn.Linear(4, 2), None, data(), config)
    torch.optim.lr_scheduler.LinearLR(loop.optimizer, start_factor=0.1)
    with pytest.raises(ConfigError, match="a torch LR scheduler"):
        for step in loop.steps():
            for batch in step:
                loop.backward(mean_loss(loop.model, batch))
            loop.step()


def test_rates_that_a_scheduler_has_left_behind_are_refused() -> None:
    earlier = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    torch.optim.lr_scheduler.LinearLR(earlier, start_factor=0.1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.load_state_dict(earlier.state_dict())
    with pytest.raises(ConfigError, match="lr = 0.01 .*initial_lr = 0.1"):
        CurveRate(optimizer, RateCurve("constant", 0, None, 0.0))


def test_learning_rate_follows_the_batch_size() -> None:
    linear = Optimization(learning_rate_scaling="linear", base_batch_size=32)
    root = Optimization(learning_rate_scaling="sqrt", base_batch_size=32)
    assert batch_size_factor(linear, 128) == 4.0
    assert batch_size_factor(root, 128) == 2.0
    assert batch_size_factor(Optimization(), 128) == 1.0


def test_keys_are_unrelated() -> None:
    seeds = {fold(a, b, c) for a in range(10) for b in range(10) for c in range(10)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    turns = {turn_seed(fold(1, 2), step, index) for step in range(100) for index in range(-1, 9)}
    assert len(turns) == 1000


PROFILE = Profile(
    num_parameters=1000, parameter_bytes=4000, gradient_bytes=4000, optimizer_bytes=8000
)


def test_costs_follow_the_layout() -> None:
    cluster = Cluster(1, 4)
    ddp = DDPStrategy(DDP()).cost(PROFILE, Layout(dp_replicate=4), cluster)
    fsdp = FSDPStrategy(FSDP()).cost(PROFILE, Layout(dp_shard=4), cluster)
    hsdp = FSDPStrategy(FSDP()).cost(PROFILE, Layout(dp_replicate=2, dp_shard=2), cluster)
    assert (ddp.state_bytes, ddp.sent_bytes_per_step) == (16_000, 6000)
    assert (fsdp.state_bytes, fsdp.sent_bytes_per_step) == (4000, 9000)
    assert (hsdp.state_bytes, hsdp.sent_bytes_per_step) == (8000, 8000)


def test_fsdp_keeps_whole_gradients_while_it_accumulates_unless_told_otherwise() -> None:
    cluster, layout = Cluster(1, 4), Layout(dp_shard=4)
    profile = replace(PROFILE, micro_batches_per_step=5)
    once = FSDPStrategy(FSDP()).cost(profile, layout, cluster)
    each = FSDPStrategy(FSDP(reduce_every_micro_batch=True)).cost(profile, layout, cluster)
    assert (once.gradient_bytes, once.sent_bytes_per_step) == (4000, 33_000)
    assert (each.gradient_bytes, each.sent_bytes_per_step) == (1000, 45_000)


def test_what_does_not_fit_is_said_before_it_is_tried() -> None:
    small = Cluster(1, 4, device_memory_bytes=7000)
    (problem,) = DDPStrategy(DDP()).problems(PROFILE, Layout(dp_replicate=4), small)
    assert "alone need 7.8 KiB per rank, and a device has 6.8 KiB" in str(problem)
    assert FSDPStrategy(FSDP()).problems(PROFILE, Layout(dp_shard=4), small) == []
    (problem,) = FSDPStrategy(FSDP()).problems(PROFILE, Layout(dp_replicate=4), small)
    assert "nothing to shard over" in str(problem)


def test_the_drop_in_trainer_answers_wrong_settings() -> None:
    with pytest.raises(ConfigError) as caught:
        PyTorchDDPTrainer(nn.Linear(2, 2), batchsize=3)
    assert str(caught.value) == "batchsize = 3: unknown setting; did you mean batch_size?"
    with pytest.raises(ConfigError) as caught:
        DistributedConfig(backend="gossip", communication_backend="nccl")
    assert str(caught.value).splitlines() == [
        "backend = gossip: not available in this release; use pytorch-ddp or pytorch-fsdp or "
        "deepspeed or horovod or ray",
        "communication_backend = nccl: needs CUDA devices, but there are none; "
        'use "auto", which uses gloo on the CPU',
    ]


def test_the_drop_in_trainer_alone_trains_the_given_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(4, 2)
    before = model.weight.clone()
    trainer = PyTorchDDPTrainer(
        model, num_gpus=1, batch_size=8, epochs=2, tensorboard=False, tensorboard_dir=str(tmp_path)
    )
    history = trainer.fit(DataLoader(data(), shuffle=True), DataLoader(data()), max_steps=9)
    assert len(history.steps) == 9
    assert trainer.best_accuracy == history.best_accuracy
    assert not torch.equal(before, model.weight)
    assert "evaluated 50 of 50" in capsys.readouterr().out


@with_tensorboard
def test_a_job_that_always_resumes_can_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def fit(max_steps: int, directory: str | None = "kept") -> tuple[int, int]:
        trainer = PyTorchDDPTrainer(
            nn.Linear(4, 2), num_gpus=1, batch_size=8, resume_from_checkpoint=True
        )
        history = trainer.fit(data(), checkpoint_dir=directory, max_steps=max_steps)
        return history.resumed_step, len(history.steps)

    assert fit(2) == (0, 2)
    assert "no checkpoint in kept yet: starting at step 0" in capfd.readouterr().out
    assert fit(5) == (2, 3)
    assert "resumed: after step 2" in capfd.readouterr().out
    with pytest.raises(ConfigError, match="resume_from_checkpoint = True: .*checkpoint_dir"):
        fit(5, None)


def test_an_output_folder_that_cannot_be_made_is_explained(
    config: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(EnvironmentProblem, match="output_dir = .*: Not a directory; give a folder"):
        Trainer(task(), {**config, "output_dir": str(file / "runs")}).fit(data())


def test_bitwise_refuses_weights_it_cannot_add(config: dict[str, Any]) -> None:
    half = Task(model=lambda: nn.Linear(4, 2).bfloat16(), loss=mean_loss)
    with pytest.raises(ConfigError, match="requires fp32 weights, and the model has bfloat16"):
        Trainer(half, {**config, "reproducibility": "bitwise"}).fit(data())


def test_a_total_weighs_what_was_there(config: dict[str, Any]) -> None:
    """Counting half the samples of each batch halves nothing: the mean is over what counts."""

    def half(model: nn.Module, batch: Any) -> Total:
        x, y = batch
        counted = torch.arange(len(y)) % 2 == 0
        losses = F.cross_entropy(model(x), y, reduction="none")
        return Total(losses[counted].sum(), counted.sum())

    history = Trainer(Task(model=lambda: nn.Linear(4, 2), loss=half), config).fit(data())
    assert history.steps[0].num_tokens == 4.0
    assert 0.3 < history.losses[0] < 2.0
