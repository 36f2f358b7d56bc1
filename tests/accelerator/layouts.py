"""Bodies that train on the test accelerator, and the layouts they train under."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.ranks.matrix import LAYOUTS, train

GROUPS = {
    "both": "cpu:gloo,sim:simccl",
    "device only": "sim:simccl",
}
"""The groups a script may have made: torch's usual one, and one that takes no host tensors."""
STEPS = 8


def train_on_device(
    output_dir: str, cells: list[tuple[str, str]], shift: int, steps: int = STEPS
) -> dict[str, list[float]]:
    """Cells (layout, model) one after the other in one world; losses by `layout, model`."""
    if shift:
        torch.accelerator.set_device_index(dist.get_rank() + shift)
    found = {}
    for layout, model in cells:
        found[f"{layout}, {model}"] = train(model, output_dir, LAYOUTS[layout][1], steps)[0]
    used = torch.get_device_module("sim").initialized_devices()
    assert used == [dist.get_rank() + shift], used
    return found


def layouts_of(world_size: int) -> list[str]:
    """Those that torch itself carries."""
    return [
        name
        for name, (ranks, _) in LAYOUTS.items()
        if ranks == world_size and not name.startswith(("deepspeed", "horovod"))
    ]
