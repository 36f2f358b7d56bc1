"""Accelerator: the one place that knows device types.

Everything else asks this: which device a rank uses, which backend carries its collectives, how it
is seeded, timed, measured and waited for. It stands on `torch.accelerator` and on the device's own
module (`torch.cuda`, `torch.xpu`, whatever an out-of-tree package registers), so that a device that
torch knows is a device that Drivetrain knows. A test keeps other files from comparing types.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist

_UNSUITABLE = frozenset({"mps"})
"""No collectives and no float64, which losses are summed in."""


@dataclass(frozen=True)
class Accelerator:
    """A rank's device; the CPU is one too."""

    device: torch.device

    @property
    def is_cpu(self) -> bool:
        """Whether the host computes itself: nothing is copied, nothing runs ahead."""
        return self.device.type == "cpu"

    @property
    def backend(self) -> str:
        """For `init_process_group`: gloo for the host's tensors, the device's own for its."""
        if self.is_cpu:
            return "gloo"
        own = dist.get_default_backend_for_device(self.device)
        return f"cpu:gloo,{self.device.type}:{own}"

    @property
    def name(self) -> str:
        """The product's name, as the driver gives it."""
        if self.is_cpu:
            return f"cpu ({platform.machine()})"
        name = getattr(self._module, "get_device_name", None)
        return self.device.type if name is None else str(name(self.device))

    @property
    def memory_bytes(self) -> int | None:
        """All of it; None when the device does not tell."""
        if self.is_cpu:
            return _host_memory_bytes()
        properties = getattr(self._module, "get_device_properties", None)
        return None if properties is None else int(properties(self.device).total_memory)

    @property
    def cache_bytes(self) -> int | None:
        """Its last-level cache; None when the device does not tell."""
        properties = getattr(self._module, "get_device_properties", None)
        found = None if properties is None else properties(self.device)
        return getattr(found, "L2_cache_size", None)

    def peak_bytes(self) -> int | None:
        """The most that tensors have taken so far; None on the CPU."""
        if self.is_cpu:
            return None
        return int(torch.accelerator.max_memory_allocated(self.device))

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        if not self.is_cpu:
            torch.accelerator.synchronize(self.device)

    def seed(self, seed: int) -> None:
        """Set the device's own random stream; the host's is not touched."""
        if not self.is_cpu:
            self._module.manual_seed(seed)

    def random_state(self) -> torch.Tensor | None:
        """Of its random stream, on the host; None on the CPU."""
        return None if self.is_cpu else self._module.get_rng_state(self.device)

    def set_random_state(self, state: torch.Tensor) -> None:
        if not self.is_cpu:
            self._module.set_rng_state(state, self.device)

    def event(self) -> torch.Event:
        """A moment on the device's own clock. Not for the CPU, whose clock is the host's."""
        return torch.Event(self.device, enable_timing=True)

    @cached_property
    def has_timed_events(self) -> bool:
        """Whether the device can tell how long it took."""
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
        """A stream beside the current one."""
        return torch.Stream(self.device)

    @property
    def current_stream(self) -> torch.Stream:
        """Where this thread's operations go."""
        return torch.accelerator.current_stream(self.device)

    @cached_property
    def _module(self) -> Any:
        return torch.get_device_module(self.device)


@lru_cache(maxsize=64)
def accelerator_of(device: torch.device) -> Accelerator:
    return Accelerator(device)


def accelerator_type() -> str:
    """The device type that ranks of this process use. Initialises none."""
    return _type_and_count()[0]


def num_devices() -> int:
    """Accelerators that this process may use; 0 when it has only its CPU. Initialises none."""
    return _type_and_count()[1]


def _type_and_count() -> tuple[str, int]:
    found = torch.accelerator.current_accelerator()  # the one torch was built for
    if found is None or found.type in _UNSUITABLE:
        return "cpu", 0
    count = torch.get_device_module(found).device_count()  # CUDA's asks the driver's library only
    return (found.type, count) if count else ("cpu", 0)


_VISIBLE = {
    "cuda": "CUDA_VISIBLE_DEVICES",  # ROCm takes it too
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "mlu": "MLU_VISIBLE_DEVICES",
}


def devices_variable() -> str | None:
    """By which a process is shown some of the devices only; None when that is not known.

    A device of another package may say it itself, as `torch.NAME.visible_devices_variable`.
    """
    kind, count = _type_and_count()
    if not count:
        return None
    told: str | None = getattr(torch.get_device_module(kind), "visible_devices_variable", None)
    return told or _VISIBLE.get(kind)


def use_device_of(local_rank: int) -> torch.device:
    """The device of this local rank, made the current one; or the CPU."""
    kind, count = _type_and_count()
    if kind == "cpu":
        return torch.device("cpu")
    return use_device(torch.device(kind, local_rank % count))


def chosen_device() -> torch.device | None:
    """The current device, where a script has changed it; the first one is everybody's default."""
    kind = accelerator_type()
    index = 0 if kind == "cpu" else torch.accelerator.current_device_index()
    return torch.device(kind, index) if index else None


def use_device(device: torch.device) -> torch.device:
    """Make it the current one of its kind."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    return device


def takes_host_tensors(group: dist.ProcessGroup) -> bool:
    """Whether a group can send tensors that lie on the CPU."""
    return any(device.type == "cpu" for device in group._device_types)  # noqa: SLF001 - its only name


def _host_memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
