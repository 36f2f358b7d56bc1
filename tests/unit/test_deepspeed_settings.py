"""What DeepSpeed is given: the run's word, the user's file, and where they differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.cluster.description import Cluster
from drivetrain.cluster.environments import detect
from drivetrain.compat.pytorch import DistributedConfig
from drivetrain.config.load import resolve
from drivetrain.core.errors import ConfigError
from drivetrain.parallel.layout import Layout
from drivetrain.parallel.world import World
from drivetrain.strategies.deepspeed import DeepSpeed
from drivetrain.strategies.deepspeed.settings import Merged, merge
from drivetrain.strategies.deepspeed.strategy import DeepSpeedStrategy
from drivetrain.strategies.strategy import Profile

EXAMPLES = Path(__file__).parents[2] / "examples" / "deepspeed"


def merged(deepspeed: dict[str, Any] | None = None, **changes: Any) -> Merged:
    parallel = {"strategy": "deepspeed", "deepspeed": deepspeed or {}}
    config = {"global_batch_size": 24, "micro_batch_size": 3, "max_steps": 1, "parallel": parallel}
    profile = Profile(1000, 4000, 4000, 8000)
    return merge(resolve({**config, **changes}).config, accumulation=4, profile=profile)


def problems(theirs: dict[str, Any], **deepspeed: Any) -> list[str]:
    return [str(problem) for problem in merged({"config": theirs, **deepspeed}).problems]


def test_the_run_says_what_makes_a_step() -> None:
    settings = merged(optimization={"max_grad_norm": 0.5}).settings
    assert settings["train_micro_batch_size_per_gpu"] == 3
    assert settings["gradient_accumulation_steps"] == 4
    assert settings["gradient_clipping"] == 0.5
    assert settings["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 1000}
    assert merged().settings["gradient_clipping"] == 0.0, "left out, DeepSpeed clips to 1"


def test_a_file_adds_what_is_its_own_affair(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    zero = {"stage": 3, "stage3_max_live_parameters": 7, "reduce_bucket_size": 9}
    file.write_text(json.dumps({"zero_optimization": zero, "wall_clock_breakdown": True}))
    both = merged({"config": str(file)})
    assert both.problems == ()
    assert both.stage == 3
    assert both.settings["zero_optimization"] == zero
    assert both.settings["wall_clock_breakdown"] is True


def test_what_is_left_open_is_filled_in() -> None:
    theirs = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "optimizer": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"},
    }
    both = merged({"config": theirs, "zero_stage": 1})
    assert both.problems == ()
    assert both.stage == 1
    assert "auto" not in json.dumps(both.settings)


def test_a_contradiction_names_both() -> None:
    theirs = {
        "train_batch_size": 32,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "Adam"},
        "fp16": {"enabled": True},
    }
    assert problems(theirs, zero_stage=2) == [
        "parallel.deepspeed.config: gradient_accumulation_steps = 2: the run's config has 4; "
        'set it in the run\'s config and remove it there, or write "auto"',
        "parallel.deepspeed.config: zero_optimization.stage = 3: the run's config has 2; "
        'set it in the run\'s config and remove it there, or write "auto"',
        "parallel.deepspeed.config: optimizer = {'type': 'Adam'}: the task sets the optimizer; "
        "remove it there",
        "parallel.deepspeed.config: fp16.enabled = True: the run's precision.dtype is fp32; "
        "set precision.dtype (fp32 weights under autocast) and remove it there",
        "parallel.deepspeed.config: train_batch_size = 32: the run's global_batch_size is 24; "
        'make them the same, or write "auto"',
    ]


def test_what_zero_cannot_do() -> None:
    (problem,) = problems({"zero_optimization": {"offload_param": {"device": "cpu"}}})
    assert "stage 2 keeps a full copy of the weights on every device" in problem
    (problem,) = problems({"zero_optimization": {"stage": 0}})
    assert "ZeRO has stages 1, 2 and 3" in problem


def test_what_a_disk_needs() -> None:
    disk = {"stage": 3, "offload_param": {"device": "nvme"}}
    (problem,) = problems({"zero_optimization": disk})
    assert (
        "offload to nvme needs a directory; set parallel.deepspeed.nvme_path to one on the disk"
    ) in problem
    both = merged({"config": {"zero_optimization": disk}, "nvme_path": "/disk"})
    assert both.problems == ()
    assert both.settings["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 1000,
        "offload_param": {"device": "nvme", "nvme_path": "/disk", "buffer_size": 1000},
        "stage3_prefetch_bucket_size": 0,
    }
    (problem,) = problems(
        {"zero_optimization": {**disk, "stage3_prefetch_bucket_size": 7}}, nvme_path="/disk"
    )
    assert "stage3_prefetch_bucket_size = 7: when prefetching weights from a disk" in problem


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (problem,) = merged({"config": str(tmp_path / "none.json")}).problems
    assert "cannot be read (No such file or directory)" in str(problem)
    (tmp_path / "bad.json").write_text("{")
    (problem,) = merged({"config": str(tmp_path / "bad.json")}).problems
    assert "is not valid JSON" in str(problem)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision": {"dtype": "fp16"}}, "precision.dtype = fp16"),
        ({"dp_replicate": 2}, "ZeRO shards over all ranks"),
        ({"deepspeed": {"offload_optimizer": "nvme"}}, "offload to nvme needs a directory"),
        ({"deepspeed": {"zero_stage": 1, "offload_param": "cpu"}}, "use zero_stage=3"),
        ({"deepspeed": {"zero_stage": 4}}, "parallel.deepspeed.zero_stage = 4"),
    ],
)
def test_what_the_config_alone_shows(changes: dict[str, Any], said: str) -> None:
    precision = changes.pop("precision", {})
    parallel = {"strategy": "deepspeed", **changes}
    config = {"global_batch_size": 8, "max_steps": 1, "parallel": parallel, "precision": precision}
    with pytest.raises(ConfigError) as caught:
        resolve(config)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "stage", "offload"),
    [
        ("zero1", 1, "none"),
        ("zero2", 2, "none"),
        ("zero3", 3, "none"),
        ("zero3-offload", 3, "cpu"),
        ("zero3-nvme", 3, "nvme"),
    ],
)
def test_the_examples_are_taken(name: str, stage: int, offload: str) -> None:
    both = merged({"config": str(EXAMPLES / f"{name}.json"), "nvme_path": "/disk"})
    assert both.problems == ()
    assert (both.stage, both.offload("offload_param")) == (stage, offload)


def test_each_stage_costs_less_and_sends_more() -> None:
    from drivetrain.strategies.deepspeed.strategy import DeepSpeedStrategy

    profile = Profile(1000, 4000, 4000, 8000, micro_batches_per_step=2)
    layout, cluster = Layout(dp_shard=4), Cluster(1, 4, None)
    costs = []
    for stage in (1, 2, 3):
        parallel = {"strategy": "deepspeed", "deepspeed": {"zero_stage": stage}}
        config = resolve({"global_batch_size": 8, "max_steps": 1, "parallel": parallel}).config
        cost = DeepSpeedStrategy(config, accumulation=2).cost(profile, layout, cluster)
        costs.append((cost.state_bytes, cost.sent_bytes_per_step))
    assert costs == [(11000, 9000), (8000, 15000), (5000, 18000)]


def test_the_drop_in_trainer_takes_a_stage_or_a_config() -> None:
    said = DistributedConfig(zero_stage=3).run_config(2)["parallel"]
    assert (said["strategy"], said["deepspeed"]["zero_stage"]) == ("deepspeed", 3)
    contents = {"zero_optimization": {"stage": 1}}
    run_config = DistributedConfig(deepspeed_config=contents).run_config(2)
    assert resolve(run_config).config.parallel.details(DeepSpeed).config == contents
    with pytest.raises(ConfigError, match="zero_stage and deepspeed_config are DeepSpeed settings"):
        DistributedConfig(zero_stage=2, backend="pytorch-fsdp")


@pytest.mark.parametrize(("stage", "weights"), [(1, "meta"), (2, "meta"), (3, "cpu")])
def test_stage_3_leaves_weights_on_the_host_until_they_are_partitioned(
    stage: int, weights: str
) -> None:
    parallel = {"strategy": "deepspeed", "deepspeed": {"zero_stage": stage}}
    config = resolve({"global_batch_size": 4, "max_steps": 1, "parallel": parallel}).config
    world = World(detect(), Layout(), torch.device("meta"), None)  # stands for any other device
    model = nn.BatchNorm1d(4)
    DeepSpeedStrategy(config, 1).apply(model, world)
    assert {p.device.type for p in model.parameters()} == {weights}
    assert {b.device.type for b in model.buffers()} == {"meta"}
