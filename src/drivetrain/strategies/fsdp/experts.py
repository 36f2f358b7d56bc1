"""FSDP2 for experts that ep has distributed, over the ranks that hold the same experts."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.expert.dispatch import is_spread
from drivetrain.parallel.parts import own_part


def shard_experts(
    model: nn.Module,
    mesh: DeviceMesh,
    num_ranks: int,
    policy: MixedPrecisionPolicy,
    reshard: bool | None,
) -> None:
    """Shard experts before and separately from their blocks: fewer ranks have the same experts.

    An expert's gradient already includes the tokens of all `ep` ranks. It is summed over the other
    ranks and divided by all `num_ranks` of data parallelism, like every other gradient.
    """
    names = mesh.mesh_dim_names or ()
    copies = ("dp_replicate", "expert_shard") if "dp_replicate" in names else ("expert_shard",)
    num_shards = mesh["expert_shard"].size()
    # the weights of the selected experts stay in the router's precision
    policy = replace(policy, cast_forward_inputs=False)
    for name, module in model.named_modules():
        if not is_spread(module):
            continue
        _check_shards(name, module, num_shards)
        fully_shard(
            module,
            mesh=mesh[copies],
            mp_policy=policy,
            reshard_after_forward=reshard,
            shard_placement_fn=lambda weight: Shard(_cut_dim(weight, num_shards) or 0),
        )
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(float(num_ranks))
            # only NCCL divides during the reduction; with a single shard torch would divide twice
            module.set_force_sum_reduction_for_comms(num_shards > 1)


def _cut_dim(weight: nn.Parameter, num_shards: int) -> int | None:
    """Return the first dimension that divides evenly, preferably between experts; or None."""
    sizes = own_part(weight.data).shape
    return next((dim for dim, size in enumerate(sizes) if size % num_shards == 0), None)


def _check_shards(name: str, module: nn.Module, num_shards: int) -> None:
    problems = [
        Problem(
            "parallel.dp_shard",
            f"{name}.{key} ({tuple(weight.shape)}) cannot be split evenly into {num_shards} shards",
            "use another dp_shard or ep",
            has_value=False,
        )
        for key, weight in module.named_parameters(recurse=False)
        if _cut_dim(weight, num_shards) is None
    ]
    if problems:
        raise ConfigError(problems)
