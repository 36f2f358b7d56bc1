"""Accelerator: the one place that knows device types.

All other code asks it: which device a rank uses, which backend runs its collectives, and how the
device is seeded, timed, measured and synchronized. It builds on `torch.accelerator` and the
device's own module (`torch.cuda`, `torch.xpu`, or one that an out-of-tree package registers), so
Drivetrain supports every device that torch supports. A test keeps other files from comparing types.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.core.memory import usable_bytes

_UNSUITABLE = frozenset({"mps"})
"""They lack collectives, and float64, in which losses are summed."""


@dataclass(frozen=True)
class Accelerator:
    """A rank's device, which may be the CPU."""

    device: torch.device

    @property
    def is_cpu(self) -> bool:
        """True if the host computes: no copies, nothing asynchronous."""
        return self.device.type == "cpu"

    @property
    def backend(self) -> str:
        """For `init_process_group`: gloo for CPU tensors, the device's backend for its tensors."""
        if self.is_cpu:
            return "gloo"
        own = dist.get_default_backend_for_device(self.device)
        return f"cpu:gloo,{self.device.type}:{own}"

    @property
    def name(self) -> str:
        """The product name that the driver reports."""
        if self.is_cpu:
            return f"cpu ({platform.machine()})"
        name = getattr(self._module, "get_device_name", None)
        return self.device.type if name is None else str(name(self.device))

    @property
    def memory_bytes(self) -> int | None:
        """Total memory; None if the device does not report it."""
        if self.is_cpu:
            return usable_bytes()
        properties = getattr(self._module, "get_device_properties", None)
        return None if properties is None else int(properties(self.device).total_memory)

    @property
    def cache_bytes(self) -> int | None:
        """Size of the last-level cache; None if the device does not report it."""
        properties = getattr(self._module, "get_device_properties", None)
        found = None if properties is None else properties(self.device)
        return getattr(found, "L2_cache_size", None)

    def peak_bytes(self) -> int | None:
        """Return the peak memory of tensors so far; None on the CPU."""
        if self.is_cpu:
            return None
        return int(torch.accelerator.max_memory_allocated(self.device))

    def synchronize(self) -> None:
        """Wait until the device has finished all enqueued work."""
        if not self.is_cpu:
            torch.accelerator.synchronize(self.device)

    def seed(self, seed: int) -> None:
        """Seed the device's random generator; the host's is not changed."""
        if not self.is_cpu:
            self._module.manual_seed(seed)

    def random_state(self) -> torch.Tensor | None:
        """Return the state of its random generator as a CPU tensor; None on the CPU."""
        return None if self.is_cpu else self._module.get_rng_state(self.device)

    def set_random_state(self, state: torch.Tensor) -> None:
        if not self.is_cpu:
            self._module.set_rng_state(state, self.device)

    def event(self) -> torch.Event:
        """Return a timed event. Not for the CPU, which uses the host's clock."""
        return torch.Event(self.device, enable_timing=True)

    @cached_property
    def has_timed_events(self) -> bool:
        """True if the device's events measure time."""
        if self.is_cpu:
            return False
        try:
            first, second = self.event(), self.event()
            first.record()
            second.record()
            second.synchronize()
            first.elapsed_time(second)
        except (RuntimeError, NotImplementedError):
            return False
        return True

    def stream(self) -> torch.Stream:
        """Return a new stream."""
        return torch.Stream(self.device)

    @property
    def current_stream(self) -> torch.Stream:
        """The stream that this thread enqueues to."""
        return torch.accelerator.current_stream(self.device)

    @cached_property
    def _module(self) -> Any:
        return torch.get_device_module(self.device)


@lru_cache(maxsize=64)
def accelerator_of(device: torch.device) -> Accelerator:
    return Accelerator(device)


def accelerator_type() -> str:
    """Return the device type that ranks of this process use. Initializes no device."""
    return _type_and_count()[0]


def num_devices() -> int:
    """Return the number of usable accelerators, 0 without any. Initializes no device."""
    return _type_and_count()[1]


def _type_and_count() -> tuple[str, int]:
    found = torch.accelerator.current_accelerator()  # the one torch was built for
    if found is None or found.type in _UNSUITABLE:
        return "cpu", 0
    count = torch.get_device_module(
        found
    ).device_count()  # on CUDA this asks only the driver's library
    return (found.type, count) if count else ("cpu", 0)


_VISIBLE = {
    "cuda": "CUDA_VISIBLE_DEVICES",  # also used by ROCm
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "mlu": "MLU_VISIBLE_DEVICES",
}


def devices_variable() -> str | None:
    """Return the environment variable that limits visible devices; None if it is unknown.

    An out-of-tree device may name it in `torch.NAME.visible_devices_variable`.
    """
    kind, count = _type_and_count()
    if not count:
        return None
    told: str | None = getattr(torch.get_device_module(kind), "visible_devices_variable", None)
    return told or _VISIBLE.get(kind)


def use_device_of(local_rank: int) -> torch.device:
    """Select this local rank's device (or the CPU) as the current one, and return it."""
    kind, count = _type_and_count()
    if kind == "cpu":
        return torch.device("cpu")
    return use_device(torch.device(kind, local_rank % count))


def chosen_device() -> torch.device | None:
    """Return the current device if the script has changed it from the default, the first."""
    kind = accelerator_type()
    index = 0 if kind == "cpu" else torch.accelerator.current_device_index()
    return torch.device(kind, index) if index else None


def use_device(device: torch.device) -> torch.device:
    """Select the device as the current one of its type, and return it."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    return device


def takes_host_tensors(group: dist.ProcessGroup) -> bool:
    """True if a group can send CPU tensors."""
    return any(device.type == "cpu" for device in group._device_types)  # noqa: SLF001 - its only name
