"""System metrics of a node (CPUs, memory, network and GPUs), under MLflow's names.

    system/cpu_utilization_percentage          system/network_receive_megabytes_per_sec
    system/system_memory_usage_percentage      system/network_transmit_megabytes_per_sec
    system/system_memory_usage_megabytes       system/process_memory_usage_megabytes
    system/gpu_0_utilization_percentage        system/gpu_0_memory_usage_percentage
    system/gpu_0_memory_usage_megabytes        system/gpu_0_power_usage_watts
    system/gpu_0_temperature_celsius           system/gpu_0_ecc_errors

Read with psutil and nvidia-ml-py; what is not installed or does not exist is left out. The GPU part
follows NVML's documented interface and has not been run on a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

_MEGA = 1e6


class SystemWatch:
    """A thread that reads the metrics periodically and passes them on."""

    def __init__(self, every_s: float, show: Callable[[Mapping[str, float]], None]) -> None:
        self._every_s, self._show = every_s, show
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drivetrain-system", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(5)

    def _run(self) -> None:
        try:
            node, gpus = NodeUsage(), Gpus()
            while not self._over.wait(self._every_s):
                self._show({**node.look(), **gpus.look()})
        except Exception as error:
            warnings.warn(f"system metrics failed and are switched off: {error!r}", stacklevel=2)


def is_available() -> bool:
    """Whether psutil, which reads the metrics, is installed."""
    return importlib.util.find_spec("psutil") is not None


class NodeUsage:
    """Processors, memory and network, by psutil."""

    def __init__(self) -> None:
        self._psutil: Any = importlib.import_module("psutil")
        self._psutil.cpu_percent()  # the first call has no interval to measure
        self._process = self._psutil.Process()
        self._traffic, self._at_s = self._psutil.net_io_counters(), time.monotonic()

    def look(self) -> dict[str, float]:
        """Return current values, and rates since the last call."""
        memory = self._psutil.virtual_memory()
        before, then_s = self._traffic, self._at_s
        self._traffic, self._at_s = self._psutil.net_io_counters(), time.monotonic()
        past_s = max(self._at_s - then_s, 1e-9) * _MEGA
        values = {
            "cpu_utilization_percentage": self._psutil.cpu_percent(),
            "system_memory_usage_percentage": memory.percent,
            "system_memory_usage_megabytes": (memory.total - memory.available) / _MEGA,
            "process_memory_usage_megabytes": self._process.memory_info().rss / _MEGA,
        }
        if before is not None and self._traffic is not None:  # a host may have no network interface
            received = self._traffic.bytes_recv - before.bytes_recv
            sent = self._traffic.bytes_sent - before.bytes_sent
            values["network_receive_megabytes_per_sec"] = received / past_s
            values["network_transmit_megabytes_per_sec"] = sent / past_s
        return {f"system/{name}": float(value) for name, value in values.items()}


class Gpus:
    """NVIDIA GPUs, read with nvidia-ml-py; none without a driver."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        if importlib.util.find_spec("pynvml") is None:
            return
        nvml: Any = importlib.import_module("pynvml")
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return
        self._nvml = nvml
        count = range(nvml.nvmlDeviceGetCount())
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in count]

    def look(self) -> dict[str, float]:
        """Return the values of every GPU of the node; unsupported ones are left out."""
        values: dict[str, float] = {}
        for index, handle in enumerate(self._handles):
            for name, ask in self._questions(handle).items():
                try:
                    values[f"system/gpu_{index}_{name}"] = float(ask())
                except self._nvml.NVMLError:
                    continue
        return values

    def _questions(self, handle: Any) -> dict[str, Callable[[], float]]:
        nvml = self._nvml

        def memory() -> Any:
            return nvml.nvmlDeviceGetMemoryInfo(handle)

        return {
            "utilization_percentage": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "memory_usage_megabytes": lambda: memory().used / _MEGA,
            "memory_usage_percentage": lambda: 100 * memory().used / memory().total,
            "power_usage_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(
                handle, nvml.NVML_TEMPERATURE_GPU
            ),
            "ecc_errors": lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_AGGREGATE_ECC
            ),
        }
