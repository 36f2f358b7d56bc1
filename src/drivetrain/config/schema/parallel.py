"""The section `parallel`, with the details of each strategy and axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from drivetrain.config.schema.section import Section


class DDP(Section):
    """Handed to torch's DistributedDataParallel."""

    find_unused_parameters: bool = False
    """Search for parameters that took no part in a step. Costs a graph walk per step."""
    bucket_cap_mb: float = Field(default=25.0, gt=0)
    """Gradients travel in buckets of this size, overlapped with backward."""
    gradient_as_bucket_view: bool = True
    """Gradients live inside the buckets, which saves one copy of them."""
    static_graph: bool = False
    """Promise torch that every step uses the same parameters."""


class FSDP(Section):
    """Handed to torch's FSDP2 `fully_shard`."""

    shard_modules: tuple[str, ...] = ()
    """Class names to shard one by one; empty: the repeated blocks of the model are found."""
    reshard_after_forward: bool | Literal["auto"] = "auto"
    """Free gathered weights after forward (less memory), or keep them (less traffic); auto: free
    the blocks', keep the root's, which backward needs first."""
    reduce_every_micro_batch: bool = False
    """Reduce gradients to shards after every micro-batch (less memory), or keep them unsharded on
    each rank and reduce once per step (less traffic)."""


class Tensor(Section):
    """How `tp` ranks share each layer."""

    plan: str | tuple[str, ...] = "model"
    """model: the model's own `tp_plan` (Hugging Face models have one). module:function: called with
    the model, returns such a plan. Or a list like [blocks.*.up=colwise, blocks.*.down=rowwise]."""
    sequence_parallel: bool = False
    """Between the layers, too, each rank keeps a part of the sequence only: norms and residuals in
    1/tp of the memory."""
    loss_parallel: bool = False
    """Leave the logits in parts and compute the cross-entropy over them: the last layer's output is
    never whole."""


class Pipeline(Section):
    """How `pp` ranks share the layers."""

    schedule: Literal[
        "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zero_bubble", "zbv", "dualpipev"
    ] = "1f1b"
    """In which order micro-batches go forward and backward. From looped_bfs and interleaved_1f1b on
    each rank has several stages."""
    split_points: tuple[str, ...] = ()
    """Names of the blocks that open a stage, the first left out; empty: balanced."""
    balance: Literal["parameters", "time"] = "parameters"
    """What stages are balanced by: number of weights, or each block's measured time."""
    stages_per_rank: int = Field(default=2, gt=0)
    """For the schedules that have several."""


class LocalSGD(Section):
    """Ranks train alone for some steps, then agree on the weights: local SGD and DiLoCo."""

    inner_steps: int = Field(default=16, gt=0)
    """Steps each rank takes alone between two exchanges."""
    outer: Literal["average", "diloco"] = "average"
    """average: the mean of the ranks' weights. diloco: a Nesterov step along their mean change."""
    outer_learning_rate: float = Field(default=0.7, gt=0)
    """Of the Nesterov step (diloco)."""
    outer_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Of the Nesterov step (diloco)."""
    warmup_steps: int = Field(default=0, ge=0)
    """First so many steps exchange gradients, as ddp does."""
    outer_dtype: Literal["fp32", "bf16"] = "fp32"
    """What the change travels in; bf16 halves the traffic once more."""


Offload = Literal["none", "cpu", "nvme"]


class DeepSpeed(Section):
    """Handed to DeepSpeed's ZeRO."""

    zero_stage: Literal[1, 2, 3] | None = None
    """1: optimizer state in shards. 2: gradients too. 3: weights too. null: `config`'s, or 2."""
    offload_optimizer: Offload | None = None
    """Keep optimizer state in host memory (cpu) or on a disk (nvme); null: as in `config`."""
    offload_param: Offload | None = None
    """Keep weights there; stage 3 only."""
    nvme_path: Path | None = None
    """A folder on the disk that nvme offload uses."""
    config: Path | dict[str, Any] | None = None
    """DeepSpeed settings of one's own, a JSON file or its contents; what they say against this
    config is refused."""


class Horovod(Section):
    """Handed to Horovod."""

    compression: Literal["none", "fp16"] = "none"
    """fp16: gradients travel in half the bytes, rounded: numbers are then not quite the same."""


class Parallel(Section):
    """How the model is spread."""

    strategy: Literal["ddp", "fsdp", "local_sgd", "deepspeed", "horovod"] = "ddp"
    """ddp: a full copy per rank. fsdp: weights, gradients and optimizer state in shards. local_sgd:
    a full copy per rank that trains alone between exchanges. deepspeed: shards, with offload, by
    DeepSpeed's ZeRO. horovod: as ddp, summed by Horovod."""
    dp_replicate: int | Literal["auto"] = "auto"
    """Number of copies of the model. With fsdp and dp_shard > 1 this makes HSDP."""
    dp_shard: int | Literal["auto"] = "auto"
    """Number of ranks that share one copy."""
    tp: int = Field(default=1, gt=0)
    """Tensor parallel: ranks that share each layer."""
    pp: int = Field(default=1, gt=0)
    """Pipeline parallel: ranks that each have some of the layers."""
    cp: int = Field(default=1, gt=0)
    """Context parallel: ranks that each have a part of every sequence."""
    ddp: DDP = DDP()
    """Details for strategy ddp."""
    fsdp: FSDP = FSDP()
    """Details for strategy fsdp."""
    tensor: Tensor = Tensor()
    """Details for tp."""
    pipeline: Pipeline = Pipeline()
    """Details for pp."""
    local_sgd: LocalSGD = LocalSGD()
    """Details for strategy local_sgd."""
    deepspeed: DeepSpeed = DeepSpeed()
    """Details for strategy deepspeed."""
    horovod: Horovod = Horovod()
    """Details for strategy horovod."""
    timeout_s: float = Field(default=600.0, gt=0)
    """How long a collective may wait for the other ranks."""
