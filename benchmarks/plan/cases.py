"""The configurations that memory predictions are held against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from drivetrain.core.section import Section
from drivetrain.parallel.layout import Layout
from drivetrain.plan.candidate import Candidate
from drivetrain.strategies.fsdp import FSDP

TRANSFORMERS = ("gpt", "hf_gpt2", "hf_llama", "hf_bert")
ALL = (*TRANSFORMERS, "resnet")
HELD_OUT = ("gpt_wide", "llama_deep")
"""Predicted once, before they were first measured; nothing was changed after."""
_SPREADS: dict[str, tuple[Layout, str]] = {
    "single": (Layout(), "ddp"),
    "ddp:2": (Layout(dp_replicate=2), "ddp"),
    "fsdp:2": (Layout(dp_shard=2), "fsdp"),
    "fsdp:4": (Layout(dp_shard=4), "fsdp"),
    "hsdp:2x2": (Layout(dp_replicate=2, dp_shard=2), "fsdp"),
    "tp:2": (Layout(tp=2), "ddp"),
    "tp:4": (Layout(tp=4), "ddp"),
    "pp:2": (Layout(pp=2), "ddp"),
    "fsdp+tp:2x2": (Layout(dp_shard=2, tp=2), "fsdp"),
    "fsdp+pp:2x2": (Layout(dp_shard=2, pp=2), "fsdp"),
}


@dataclass(frozen=True)
class Case:
    """One configuration."""

    model: str
    spread: str
    micro_batch_size: int
    accumulation: int = 1
    optimizer: str = "adamw"
    recompute: str = "none"
    precision: str = "fp32"
    reduce_each: bool = False

    @property
    def name(self) -> str:
        """For tables and files."""
        return (
            f"{self.model} {self.spread} micro-batch {self.micro_batch_size} × "
            f"{self.accumulation} {self.optimizer} recompute {self.recompute} {self.precision}"
            + (" reduce each" if self.reduce_each else "")
        )

    @property
    def is_held_out(self) -> bool:
        """Whether its model is."""
        return self.model in HELD_OUT

    @property
    def candidate(self) -> Candidate:
        """As the planner says it."""
        layout, strategy = _SPREADS[self.spread]
        said: dict[str, Any] = {"precision": self.precision, "recompute": self.recompute}
        return Candidate(
            layout,
            strategy,
            micro_batch_size=self.micro_batch_size,
            accumulation=self.accumulation,
            options=FSDP(reduce_every_micro_batch=True) if self.reduce_each else Section(),
            **said,
        )


def cases() -> list[Case]:
    """All of them, one device first."""
    return [*_single(), *_copies(), *_shards(), *_divided(), *_half(), *_held_out()]


def _single() -> Iterator[Case]:
    for model in ALL:
        for batch in (4, 16):
            for optimizer in ("adamw", "sgd", "adagrad"):
                yield Case(model, "single", batch, optimizer=optimizer)
        yield Case(model, "single", 8, accumulation=2)
    for model in TRANSFORMERS:
        for batch in (4, 16):
            yield Case(model, "single", batch, recompute="full")
        yield Case(model, "single", 16, recompute="selective")


def _copies() -> Iterator[Case]:
    # without Hugging Face's BERT: untied, it has a bias that no loss reaches, which ddp refuses
    for model in (m for m in ALL if m != "hf_bert"):
        for batch in (4, 16):
            yield Case(model, "ddp:2", batch)
    for model in ("gpt", "hf_gpt2", "hf_llama"):
        yield Case(model, "ddp:2", 8, recompute="full")
    yield Case("gpt", "ddp:2", 8, accumulation=2)


def _shards() -> Iterator[Case]:
    for model in TRANSFORMERS:
        for batch in (4, 16):
            yield Case(model, "fsdp:2", batch)
        yield Case(model, "fsdp:2", 16, recompute="full")
        yield Case(model, "fsdp:4", 8)
    for model in ("gpt", "hf_llama"):
        yield Case(model, "fsdp:2", 8, accumulation=2)
        yield Case(model, "fsdp:2", 8, accumulation=2, reduce_each=True)
        yield Case(model, "fsdp:2", 8, optimizer="sgd")
        yield Case(model, "hsdp:2x2", 8)
        yield Case(model, "fsdp:4", 16, recompute="selective")
    yield Case("resnet", "fsdp:2", 8)


def _divided() -> Iterator[Case]:
    for model in ("gpt", "hf_llama"):
        for batch in (4, 16):
            yield Case(model, "tp:2", batch)
        yield Case(model, "tp:2", 16, recompute="full")
        yield Case(model, "fsdp+tp:2x2", 8)
        yield Case(model, "fsdp+pp:2x2", 8, accumulation=4)
    yield Case("gpt", "tp:4", 8)
    for model in ("gpt", "hf_llama", "hf_gpt2"):
        for batch in (4, 8):
            yield Case(model, "pp:2", batch, accumulation=4)
        yield Case(model, "pp:2", 8, accumulation=4, recompute="full")


def _half() -> Iterator[Case]:
    for model in ALL:
        yield Case(model, "single", 8, precision="bf16")
    for model in ("gpt", "hf_llama", "hf_gpt2"):
        yield Case(model, "fsdp:2", 8, precision="bf16")
        yield Case(model, "ddp:2", 8, precision="bf16")


def _held_out() -> Iterator[Case]:
    for model in HELD_OUT:
        yield Case(model, "single", 6)
        yield Case(model, "single", 12, recompute="full", optimizer="sgd")
        yield Case(model, "ddp:2", 6, accumulation=2)
        yield Case(model, "fsdp:2", 12, recompute="selective")
        yield Case(model, "fsdp:4", 6)
        yield Case(model, "tp:2", 12)
        yield Case(model, "fsdp+tp:2x2", 6)
        yield Case(model, "fsdp+pp:2x2", 6, accumulation=4)
