"""Memory under DeepSpeed's ZeRO, by its stages. Coarser than the walks: DeepSpeed is not traced."""

from __future__ import annotations

from dataclasses import replace

from drivetrain.plan.candidate import Candidate
from drivetrain.plan.cost.memory import Memory, stage_memory, without_offloaded
from drivetrain.plan.profile.model import ModelProfile

# DeepSpeed's default buckets for reducing gradients and gathering weights: 5e8 elements, but never
# more than there are
_BUCKET_BYTES = 2e9


def zero_memory(
    profile: ModelProfile, candidate: Candidate, *, on_accelerator: bool = False
) -> Memory:
    """Stage 1: optimizer state in shards; 2: gradients too; 3: weights too."""
    stage = candidate.zero_stage or 2
    shards = candidate.layout.dp_shard
    trained = profile.total("trained")
    bucket = min(_BUCKET_BYTES, trained)
    # ZeRO steps on a second copy of the weights' shard
    state = (profile.total("optimizer") + trained) / shards
    if stage == 3:
        as_fsdp = replace(
            candidate,
            strategy="fsdp",
            zero_stage=None,
            offload="none",
            reduce_every_micro_batch=True,
        )
        memory = stage_memory(profile, as_fsdp, 0, on_accelerator=on_accelerator)
        memory = replace(memory, optimizer=state, gathered=memory.gathered + bucket / 2)
        return without_offloaded(memory, candidate)
    as_ddp = replace(candidate, strategy="ddp", zero_stage=None, offload="none")
    memory = stage_memory(profile, as_ddp, 0, on_accelerator=on_accelerator)
    gradients = trained / (shards if stage == 2 else 1)
    extra = memory.activations if memory.moment != "optimizer" else 0.0
    backward = max(extra, profile.saved_bytes(candidate.micro_batch_size))
    memory = replace(
        memory, optimizer=state, gradients=gradients, activations=backward, gathered=bucket
    )
    return without_offloaded(memory, candidate)
