"""Staging: a copy of this rank's tensors in host memory, from which they are written.

On the CPU a step waits for the copy and nothing else. On an accelerator it does not wait: copies
run on a separate stream, into page-locked memory, beside the next step's forward and backward.
Two orders must hold. Code that changes the tensors waits for the copies (`before_change`, which
orders streams and does not block the host), and the thread that writes the copies waits until they
have arrived (`synchronize_staging`, which blocks that thread). Tensors that a forward pass may
change (running statistics, a teacher's weights: everything that is neither trained nor optimizer
state) are copied on the steps' own stream.

A copy is as large as the weights and optimizer state that a rank saves, and there is never more
than one. On the CPU its memory is freed after the save; page-locked memory, which is slow to
allocate, is kept from save to save.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from drivetrain.parallel.accelerator import Accelerator, use_device
from drivetrain.parallel.parts import own_part


class CopyInMemory(AsyncStager):
    """Implements torch's AsyncStager; handles one save at a time."""

    _synchronize_after_execute = False

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._can_pin = not accelerator.is_cpu
        self._kept: dict[str, torch.Tensor] = {}
        self._stream: torch.Stream | None = None
        self._copied: list[torch.Event] = []
        """Events recorded after the pending copies."""
        self._sources: dict[str, tuple[torch.Tensor, int]] = {}
        """Tensors being copied, with their versions; held so that their memory is not reused."""
        self._looking = Lock()
        """Keeps weights unchanged while the writing thread compares versions."""
        self._torn = ""
        self._waits_at_once = False
        self.changes_in_forward: Callable[[str], bool] = lambda _: True
        """By name: whether a tensor may change before the next optimizer step."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the copies by the same names: done on the CPU, pending on an accelerator."""
        for name, tensor in state_dict.items():
            kept = self._kept.get(name)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                self._kept[name] = self._room_for(tensor)
        staged = {name: self._kept[name] for name in state_dict}
        with torch.no_grad():
            if self._accelerator.is_cpu:
                _copy(staged, state_dict, state_dict, non_blocking=False)
            else:
                self._copy_beside(staged, state_dict)
        return staged

    @property
    def is_copying(self) -> bool:
        """True while code that changes the tensors must still wait for the copies."""
        return bool(self._sources)

    def before_change(self) -> None:
        """Make the device finish the copies before weights or optimizer state change.

        A script that changes weights elsewhere (in its loss, in a hook) changes them too early.
        Such a save fails, and later saves wait for their copies immediately.
        """
        if not self._sources:
            return
        for event in self._copied:
            self._accelerator.current_stream.wait_event(event)
        with self._looking:
            self._look_for_changes()
            self._sources = {}

    def synchronize_staging(self) -> None:
        """Wait until the copies have arrived. Called by the thread that writes them."""
        # a new thread uses device 0, where the first CUDA call allocates a context
        use_device(self._accelerator.device)
        for event in self._copied:
            event.synchronize()
        with self._looking:
            self._look_for_changes()
        if self._torn:
            raise RuntimeError(f"{self._torn} was changed while it was being copied")

    @property
    def num_bytes(self) -> int:
        """Host memory that the copies take."""
        return sum(own_part(tensor).nbytes for tensor in self._kept.values())

    def written(self) -> None:
        """Call this after the save. On the CPU it frees the copies."""
        if self._accelerator.is_cpu:
            self.close()

    def close(self) -> None:
        """Free the copies."""
        self._kept = {}

    def _copy_beside(self, staged: dict[str, torch.Tensor], state_dict: dict[str, Any]) -> None:
        steps = self._accelerator.current_stream
        at_once = {name for name in state_dict if self.changes_in_forward(name)}
        beside = {name: tensor for name, tensor in state_dict.items() if name not in at_once}
        _copy(staged, state_dict, at_once, non_blocking=True)
        self._copied = [steps.record_event()]
        if self._stream is None:
            self._stream = self._accelerator.stream()
        self._stream.wait_event(self._copied[0])  # what is copied must have been computed
        with self._stream:
            _copy(staged, state_dict, beside, non_blocking=True)
            self._copied.append(self._stream.record_event())
        self._sources = {name: (tensor, version_of(tensor)) for name, tensor in beside.items()}
        self._torn = ""
        if self._waits_at_once:
            self.before_change()

    def _look_for_changes(self) -> None:
        sources = self._sources.items()
        self._torn = self._torn or next(
            (n for n, (t, version) in sources if version_of(t) != version), ""
        )
        self._waits_at_once = self._waits_at_once or bool(self._torn)

    def _room_for(self, tensor: torch.Tensor) -> torch.Tensor:
        local = own_part(tensor)
        room = self._host_memory(local.shape, local.dtype)
        if not isinstance(tensor, DTensor):
            return room
        # not DTensor.from_local(), which would move it to the mesh's device
        return DTensor(room, tensor._spec, requires_grad=False)  # noqa: SLF001 - as torch's own staging

    def _host_memory(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        if self._can_pin:
            try:
                return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self._can_pin = False
                cause = str(error).partition("\n")[0]
                warnings.warn(
                    f"no page-locked memory for checkpoint copies ({cause}): steps wait for them",
                    stacklevel=2,
                )
        return torch.empty(shape, dtype=dtype, device="cpu")


def version_of(tensor: torch.Tensor) -> int:
    """Return torch's counter of in-place changes.

    A DTensor and its local tensor have separate counters, which are added up here. Changes through
    `.data`, and by foreach operators on DTensors, are not counted.
    """
    version = tensor._version  # noqa: SLF001 - it has no other name
    if isinstance(tensor, DTensor):
        version += tensor._local_tensor._version  # noqa: SLF001 - to_local() may give a view
    return version


def _copy(
    targets: dict[str, torch.Tensor],
    sources: dict[str, Any],
    names: Iterable[str],
    *,
    non_blocking: bool,
) -> None:
    """Copy all tensors in one call, whatever their dtypes."""
    chosen = list(names)
    if chosen:
        torch._foreach_copy_(
            [own_part(targets[name]).detach() for name in chosen],
            [own_part(sources[name]).detach() for name in chosen],
            non_blocking=non_blocking,
        )
