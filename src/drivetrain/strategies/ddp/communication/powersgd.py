"""PowerSGD, torch's own: a gradient matrix travels as two thin ones, the error is sent later."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from drivetrain.config.schema import PowerSGD as PowerSGDConfig
from drivetrain.strategies.ddp.communication.compressor import Mean, take_to

_BY_BUCKET = ("error_dict", "p_memory_dict", "q_memory_dict")


class PowerSGD:
    """torch's hook, with a state that can be saved without pickle."""

    name = "powersgd"

    def __init__(self, config: PowerSGDConfig, group: dist.ProcessGroup) -> None:
        self._state = PowerSGDState(
            group,
            matrix_approximation_rank=config.rank,
            start_powerSGD_iter=config.start_step,
            min_compression_rate=config.min_compression_rate,
            orthogonalization_epsilon=1e-8,  # a column of zeros must not become one of NaNs
        )

    def exchange(self, bucket: GradBucket) -> Mean:
        """torch's, once what was kept fits the bucket."""
        index, device = bucket.index(), bucket.buffer().device
        for name in _BY_BUCKET:
            take_to(device, getattr(self._state, name), index)
        error = self._state.error_dict.get(index)
        if error is not None and error.shape != bucket.buffer().shape:
            for name in _BY_BUCKET:  # restored from a run with other bucket sizes
                getattr(self._state, name).pop(index, None)
        return powerSGD_hook(self._state, bucket)

    def state_dict(self) -> dict[str, Any]:
        """Errors, the thin matrices each step starts from, the step, the random stream."""
        stream: Any = self._state.rng.get_state()
        name, keys, position, has_gauss, cached = stream
        return {
            **{kept: dict(getattr(self._state, kept)) for kept in _BY_BUCKET},
            "iter": self._state.iter,
            "rng": [name, torch.from_numpy(keys.copy()), position, has_gauss, cached],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The same."""
        for kept in _BY_BUCKET:
            setattr(self._state, kept, dict(state[kept]))
        self._state.iter = state["iter"]
        name, keys, position, has_gauss, cached = state["rng"]
        self._state.rng.set_state((name, keys.numpy(), position, has_gauss, cached))
