"""Bodies that run on ranks, and what the tests compare of them."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from drivetrain.train.history import EvaluationResult
from drivetrain.train.saving.weights import weights_sha256
from drivetrain.train.trainer import Trainer
from tests.gpt_task import Sentences, collate, gpt_task

# Nothing divides anything: 101 samples, batches of 24, micro-batches of 3, up to 4 ranks.
NUM_SAMPLES, NUM_VAL = 101, 53
PARITY = 1e-5


def settings(output_dir: str, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "global_batch_size": 24,
        "micro_batch_size": 3,
        "max_steps": 50,
        "output_dir": output_dir,
        "optimization": {
            "learning_rate": 3e-3,
            "max_grad_norm": 1.0,
            "warmup_steps": 5,
            "lr_scheduler_type": "cosine",
        },
        "record": {"progress": "none", "sinks": []},
    }
    return {**config, **changes}


def sentences(length: int = NUM_SAMPLES) -> DataLoader[Any]:
    return DataLoader(Sentences(length), collate_fn=collate, shuffle=True)


def train_gpt(
    output_dir: str, with_hash: bool = False, **changes: Any
) -> tuple[list[float], EvaluationResult, str]:
    trainer = Trainer(gpt_task(), settings(output_dir, **changes))
    history = trainer.fit(sentences(), DataLoader(Sentences(NUM_VAL), collate_fn=collate))
    assert trainer.assembly is not None
    digest = ""
    if with_hash:
        digest = weights_sha256(trainer.assembly.engine.spread.full_state())
    return history.losses, history.evaluations[-1], digest


def train_layouts(
    output_dir: str, layouts: dict[str, dict[str, Any]], **changes: Any
) -> dict[str, list[float]]:
    """Several layouts one after the other in one world: ranks are started once."""
    return {
        name: train_gpt(output_dir, parallel=parallel, **changes)[0]
        for name, parallel in layouts.items()
    }


def largest_deviation(losses: list[float], reference: list[float]) -> float:
    assert len(losses) == len(reference)
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


def assert_same_training(losses: list[float], reference: list[float]) -> None:
    deviation = largest_deviation(losses, reference)
    assert deviation <= PARITY, f"losses part by {deviation:.2e}, more than {PARITY:.0e}"
