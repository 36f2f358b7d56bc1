"""The whole config: the keys of a run itself, and its sections."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from drivetrain.config.schema.checkpoint import Checkpoint
from drivetrain.config.schema.communication import Communication
from drivetrain.config.schema.compile import Compile
from drivetrain.config.schema.data import Data
from drivetrain.config.schema.evaluation import Evaluation
from drivetrain.config.schema.memory import Memory
from drivetrain.config.schema.optimization import Optimization
from drivetrain.config.schema.parallel import Parallel
from drivetrain.config.schema.precision import Precision
from drivetrain.config.schema.record import Record
from drivetrain.config.schema.sentinel import Sentinel
from drivetrain.core.section import Section


class RunConfig(Section):
    """One run, from its first step to its last."""

    global_batch_size: int = Field(gt=0)
    """Samples per optimizer step over all ranks. Never changed by the number of ranks."""
    micro_batch_size: int | Literal["auto"] = "auto"
    """Samples that go through the model at once. auto: each rank's whole share of the batch."""
    max_steps: int | None = Field(default=None, gt=0)
    """Optimizer steps in the run; wins over num_train_epochs."""
    num_train_epochs: int | None = Field(default=None, gt=0)
    """Passes over the training data."""
    seed: int = Field(default=42, ge=0, lt=2**63)
    """Sample order, initial weights and dropout all follow from it."""
    reproducibility: Literal["standard", "bitwise"] = "standard"
    """bitwise: the same weights, bit for bit, at any number of data-parallel ranks."""
    fault_tolerance: Literal["restart", "live"] = "restart"
    """restart: after a failure all ranks start again from the last checkpoint. live: ddp replicas
    go on without the lost one, which comes back by itself (`drivetrain train --live`)."""
    name: str | None = Field(default=None, coerce_numbers_to_str=True)
    """Name of the run; null: the time it started."""
    output_dir: Path = Path("runs")
    """Run directories are made here."""
    optimization: Optimization = Optimization()
    """Learning rate, schedule, clipping."""
    precision: Precision = Precision()
    """Number formats."""
    parallel: Parallel = Parallel()
    """How the model is spread."""
    communication: Communication = Communication()
    """Gradient compression."""
    memory: Memory = Memory()
    """Recomputation."""
    compile: Compile = Compile()
    """torch.compile."""
    data: Data = Data()
    """Loading."""
    evaluation: Evaluation = Evaluation()
    """Validation."""
    checkpoint: Checkpoint = Checkpoint()
    """Saving, and going on from what was saved."""
    record: Record = Record()
    """Events, sinks, progress."""
    sentinel: Sentinel = Sentinel()
    """Watching the copies of the model."""
