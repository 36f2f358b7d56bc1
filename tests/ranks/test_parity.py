"""Same numbers: what any number of ranks trains is what one process trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.data.batches import BatchPlan
from drivetrain.data.rank_sample_ids import RankSampleIds
from drivetrain.testing import run_ranks
from drivetrain.train.optimization.schedule import RateCurve
from drivetrain.train.trainer import Trainer
from drivetrain.train.watch.meter import Meter
from tests.gpt_task import GPT, Sentences, collate, gpt_task, token_loss
from tests.ranks.training import (
    NUM_SAMPLES,
    assert_same_training,
    sentences,
    settings,
    train_gpt,
    train_layouts,
)

DDP: dict[str, Any] = {"strategy": "ddp"}
FSDP: dict[str, Any] = {"strategy": "fsdp"}
SERVED: dict[str, Any] = {"strategy": "parameter_server"}
HSDP: dict[str, Any] = {"strategy": "fsdp", "dp_replicate": 2, "dp_shard": 2}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    losses, _, _ = train_gpt(str(tmp_path_factory.mktemp("reference")))
    torch.set_num_threads(threads)
    assert len(losses) == 50
    assert losses[-1] < losses[0]
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "layouts"),
    [
        pytest.param(2, {"ddp": DDP, "fsdp": FSDP}, marks=pytest.mark.long),
        pytest.param(3, {"ddp": DDP}, marks=pytest.mark.long),
        (4, {"ddp": DDP, "fsdp": FSDP, "hsdp": HSDP, "parameter_server": SERVED}),
    ],
)
def test_every_layout_trains_what_one_process_trains(
    world_size: int,
    layouts: dict[str, dict[str, Any]],
    reference: list[float],
    tmp_path: Path,
) -> None:
    for by_layout in run_ranks(train_layouts, world_size, 500, args=(str(tmp_path), layouts)):
        for losses in by_layout.values():
            assert_same_training(losses, reference)


def correct_by_own_count(meter: Meter) -> torch.Tensor:
    """What plain data parallelism does: each rank divides by its own tokens."""
    here = meter._open
    count = torch.zeros(1, dtype=torch.float64)
    for part in here.counts:
        count += part
    here.global_count = meter._world.sum(count.clone())
    return (here.batch_samples / (2 * count)).float().squeeze()


def train_with_wrong_normalisation(output_dir: str) -> list[float]:
    Meter.count_correction = correct_by_own_count  # type: ignore[method-assign, assignment]
    return train_gpt(output_dir, sentinel={"every_steps": None})[0]  # it would end the run


def test_a_wrong_normalisation_is_caught(reference: list[float], tmp_path: Path) -> None:
    losses = run_ranks(train_with_wrong_normalisation, 2, 120, args=(str(tmp_path),))[0]
    with pytest.raises(AssertionError, match="losses part by"):
        assert_same_training(losses, reference)


def test_the_loop_trains_what_plain_torch_trains(tmp_path: Path) -> None:
    """Against a loop that knows nothing of micro-batches: the whole global batch at once."""
    steps = 12
    config = settings(str(tmp_path), max_steps=steps)
    trainer = Trainer(gpt_task(dropout=0.0), config)
    weights: dict[str, torch.Tensor] = {}

    model = GPT(dropout=0.0)
    build = trainer.task.model
    object.__setattr__(trainer.task, "model", lambda: _copied(build(), weights))
    history = trainer.fit(sentences())

    model.load_state_dict(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    plan = BatchPlan(24, 24, 1, NUM_SAMPLES)
    ids = RankSampleIds(plan, 0, 42, shuffle=True)
    schedule = RateCurve("cosine", 5, steps, 0.0)
    dataset, expected = Sentences(NUM_SAMPLES), []
    for step in range(steps):
        (micro,) = plan.micro_batches(step, 0)
        samples = [dataset[i] for i in ids.ids(micro)]
        total = token_loss(model, collate(samples))
        loss = total.sum / total.count
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 3e-3 * schedule.factor(step)
        optimizer.step()
        expected.append(loss.item())
    assert_same_training(history.losses, expected)


def _copied(model: torch.nn.Module, into: dict[str, torch.Tensor]) -> torch.nn.Module:
    into.update({name: value.clone() for name, value in model.state_dict().items()})
    return model


def train_two_ways(output_dir: str) -> tuple[list[float], list[float]]:
    plain = train_gpt(output_dir, max_steps=10)[0]
    recomputed = train_gpt(output_dir, max_steps=10, memory={"activation_checkpointing": "full"})
    return plain, recomputed[0]


def test_recomputing_activations_changes_no_number(tmp_path: Path) -> None:
    for plain, recomputed in run_ranks(train_two_ways, 2, 120, args=(str(tmp_path),)):
        assert_same_training(recomputed, plain)


def train_in_precision(output_dir: str, dtype: str) -> dict[str, list[float]]:
    layouts = {"ddp": DDP, "fsdp": FSDP}
    # a scale that fp16 can start with: a skipped first step would be another training
    precision = {"dtype": dtype, "scaler": {"init_scale": 256.0}}
    return train_layouts(output_dir, layouts, max_steps=12, precision=precision)


# Relative to fp32 over 12 steps: bf16 keeps 8 bits of mantissa, fp16 keeps 11.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [pytest.param("bf16", 2e-2, marks=pytest.mark.long), ("fp16", 5e-3)]
)
@pytest.mark.long
def test_lower_precision_stays_close(dtype: str, tolerance: float, tmp_path: Path) -> None:
    from tests.ranks.training import largest_deviation

    exact = train_gpt(str(tmp_path), max_steps=12)[0]
    for by_layout in run_ranks(train_in_precision, 2, 120, args=(str(tmp_path), dtype)):
        for losses in by_layout.values():
            assert 0 < largest_deviation(losses, exact) < tolerance
