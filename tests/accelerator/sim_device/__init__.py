"""The test accelerator under torch's names: `torch.device("sim")`, `torch.sim`, backend `simccl`.

torch loads it by itself (entry point `torch.backends`) in every process that finds the build folder
on its path, as it would load a vendor's package; see `tests/accelerator/README.md`.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import _sim_device as _device
import torch
import torch.distributed as dist
from torch.utils import backend_registration

_NAME = "sim"
VISIBLE = "SIM_VISIBLE_DEVICES"


class Interval(NamedTuple):
    """Something the device did, by the machine's monotonic clock."""

    device: int
    stream: int
    kind: str
    name: str
    start_s: float
    end_s: float


class Synchronization(NamedTuple):
    """Something that made the host wait for the device."""

    cause: str
    where: str
    """`file:line` of the innermost frame outside torch; empty in a thread without one."""


def set_op_cost(seconds: float, name: str = "") -> None:
    """Device time of an operator such as "aten::mm"; of all without a cost of their own."""
    _device.set_op_cost(name, seconds)


def set_copy_cost(fixed_s: float, per_byte_s: float = 0.0) -> None:
    """Device time of a copy between host and device."""
    _device.set_cost("copy", fixed_s, per_byte_s)


def set_collective_cost(fixed_s: float, per_byte_s: float = 0.0) -> None:
    """Device time of a collective, from the moment its last rank is ready."""
    _device.set_cost("collective", fixed_s, per_byte_s)


def set_slowdown(factor: float, device: int | None = None) -> None:
    """Let everything on a device take longer."""
    _device.set_slowdown(_device.current_device() if device is None else device, factor)


def take_intervals() -> list[Interval]:
    """What the devices did since `keep_intervals(True)` or the last call."""
    return [Interval(*fields) for fields in _device.take_intervals()]


def num_synchronizations() -> int:
    """How often the host has waited for a device."""
    return int(_device.num_synchronizations())


@contextmanager
def watching_synchronizations() -> Iterator[list[Synchronization]]:
    """Every wait of the host for a device while this is open, with file and line."""
    seen: list[Synchronization] = []
    _device.listen(lambda cause: seen.append(Synchronization(cause, _caller())))
    try:
        yield seen
    finally:
        _device.listen(None)


def _caller() -> str:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/torch/" not in path and path != __file__ and "<frozen" not in path:
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _index(device: Any = None) -> int:
    if device is None:
        return int(_device.current_device())
    if isinstance(device, int):
        return device if device >= 0 else int(_device.current_device())
    index = torch.device(device).index
    return int(_device.current_device()) if index is None else index


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **names: int) -> Stream:
        if names:
            return super().__new__(cls, priority=priority, **names)
        return super().__new__(cls, device=torch.device(_NAME, _index(device)), priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, **_: Any) -> Event:
        return super().__new__(cls, _NAME, enable_timing=enable_timing, blocking=blocking)


class device:  # noqa: N801 - torch.cuda.device is called so
    """The current device, for a while."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = _device.current_device()
        _device.set_device(self._index)

    def __exit__(self, *_: object) -> None:
        _device.set_device(self._before)


_is_initialized = False


def _lazy_init() -> None:
    global _is_initialized  # noqa: PLW0603 - one per process, as CUDA's
    _is_initialized = True


def is_initialized() -> bool:
    return _is_initialized or bool(_device.initialized_devices())


def set_device(device: Any) -> None:
    _lazy_init()
    _device.set_device(_index(device))


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Any = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=20)


@contextmanager
def stream(chosen: torch.Stream | None) -> Iterator[None]:
    if chosen is None:
        yield
        return
    with chosen:
        yield


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def memory_allocated(device: Any = None) -> int:
    return int(torch.accelerator.memory_allocated(_index(device)))


def max_memory_allocated(device: Any = None) -> int:
    return int(torch.accelerator.max_memory_allocated(_index(device)))


def reset_peak_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def manual_seed(seed: int) -> None:
    _device.default_generator(_index()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(_device.device_count()):
        _device.default_generator(index).manual_seed(seed)


def get_rng_state(device: Any = None) -> torch.Tensor:
    state: torch.Tensor = _device.default_generator(_index(device)).get_state()
    return state


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    _device.default_generator(_index(device)).set_state(state)


class DeviceProperties(NamedTuple):
    name: str
    total_memory: int


def get_device_name(device: Any = None) -> str:
    """With its own number, where a process is shown some of the devices only."""
    visible = os.environ.get(VISIBLE)
    return f"Simulated accelerator{' ' + visible.split(',')[_index(device)] if visible else ''}"


def get_device_properties(device: Any = None) -> DeviceProperties:
    _, total = torch.accelerator.get_memory_info(_index(device))
    return DeviceProperties(get_device_name(device), total)


def _module() -> types.ModuleType:
    """torch.sim."""
    module = types.ModuleType(f"torch.{_NAME}")
    here = globals()
    names = (
        "Stream Event device current_stream default_stream stream synchronize memory_allocated "
        "max_memory_allocated reset_peak_memory_stats manual_seed manual_seed_all get_rng_state "
        "set_rng_state get_device_name get_device_properties set_op_cost set_copy_cost "
        "set_collective_cost set_slowdown take_intervals num_synchronizations "
        "watching_synchronizations"
    )
    for name in names.split():
        setattr(module, name, here[name])
    module.keep_intervals = _device.keep_intervals  # type: ignore[attr-defined]
    module.reset_costs = _device.reset_costs  # type: ignore[attr-defined]
    module.visible_devices_variable = VISIBLE  # type: ignore[attr-defined]
    module.is_available = lambda: True  # type: ignore[attr-defined]
    module.is_initialized = is_initialized  # type: ignore[attr-defined]
    module.initialized_devices = _device.initialized_devices  # type: ignore[attr-defined]
    module.device_count = _device.device_count  # type: ignore[attr-defined]
    module.current_device = _device.current_device  # type: ignore[attr-defined]
    module.set_device = set_device  # type: ignore[attr-defined]
    module.set_stream = torch.accelerator.set_stream  # type: ignore[attr-defined]
    module._is_in_bad_fork = _device.is_in_bad_fork  # type: ignore[attr-defined]
    module._lazy_init = _lazy_init  # type: ignore[attr-defined]
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]  # type: ignore[attr-defined]
    return module


def _make_simccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
    from torch._C import _distributed_c10d as c10d

    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_default_device()]
    return _device.make_simccl(gloo(store, rank, size, options))


def autoload() -> None:
    """Called by torch at the end of its import."""
    backend_registration.rename_privateuse1_backend(_NAME)
    torch._register_device_module(_NAME, _module())
    backend_registration.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend("simccl", _make_simccl, devices=[_NAME])
