"""The copy that a save is written from: what is copied where, who waits for whom.

A stand-in for a device notes the order of what it is asked; tests/accelerator/test_saving.py has
the same on a device whose copies take their time.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from drivetrain.checkpoint import staging
from drivetrain.checkpoint.staging import CopyInMemory, _copy, version_of
from drivetrain.parallel.accelerator import accelerator_of

CPU = torch.device("cpu")


class Event:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def synchronize(self) -> None:
        self._log.append(f"the writer waits for {self.name}")


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log
        self.num_events = 0

    def record_event(self) -> Event:
        self.num_events += 1
        return Event(f"{self.name} {self.num_events}", self._log)

    def wait_event(self, event: Event) -> None:
        self._log.append(f"{self.name} waits for {event.name}")

    def __enter__(self) -> None:
        self._log.append(f"on {self.name}")

    def __exit__(self, *_: object) -> None:
        self._log.append("back")


class Device:
    """Its tensors lie on the CPU."""

    is_cpu, device = False, CPU

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current_stream = Stream("steps", self.log)
        self.num_streams = 0

    def stream(self) -> Stream:
        self.num_streams += 1
        return Stream("copies", self.log)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """With page-locked memory, and copies that are noted."""
    made = Device()
    empty, copy = torch.empty, torch._foreach_copy_

    def room(*args: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        made.log.append(f"room {'locked' if pin_memory else 'plain'}")
        assert more["device"] == "cpu"
        return empty(*args, **more)

    def noted(targets: Any, sources: Any, *, non_blocking: bool) -> None:
        made.log.append(f"copy {len(sources)}{'' if non_blocking else ' at once'}")
        copy(targets, sources)

    monkeypatch.setattr(torch, "empty", room)
    monkeypatch.setattr(torch, "_foreach_copy_", noted)
    return made


def stager(device: Any, *steady: str) -> CopyInMemory:
    made = CopyInMemory(device)
    made.changes_in_forward = lambda name: name not in steady
    return made


def state() -> dict[str, Any]:
    return {"weight": torch.ones(4), "bias": torch.ones(2), "mean": torch.ones(3)}


def test_on_the_cpu_a_copy_is_done_at_once_and_given_back_when_it_is_written() -> None:
    copies = CopyInMemory(accelerator_of(CPU))
    tensors = state()
    staged = copies.stage(tensors)
    assert not copies.is_copying
    assert copies.num_bytes == 4 * (4 + 2 + 3)
    tensors["weight"].zero_()
    copies.before_change()
    copies.synchronize_staging()
    assert staged["weight"].tolist() == [1.0] * 4
    copies.written()
    assert copies.num_bytes == 0


def test_what_a_forward_may_change_is_copied_first_and_the_rest_beside_the_steps(
    device: Device,
) -> None:
    copies = stager(device, "weight", "bias")
    tensors = state()
    staged = copies.stage(tensors)
    assert device.log == [
        *["room locked"] * 3,
        "copy 1",
        "copies waits for steps 1",
        "on copies",
        "copy 2",
        "back",
    ]
    assert all(torch.equal(staged[name], tensors[name]) for name in tensors)
    assert list(staged) == list(tensors)


def test_before_a_change_the_device_waits_for_both_copies_and_once(device: Device) -> None:
    copies = stager(device, "weight")
    copies.stage(state())
    assert copies.is_copying
    device.log.clear()
    copies.before_change()
    assert device.log == ["steps waits for steps 1", "steps waits for copies 1"]
    assert not copies.is_copying
    copies.before_change()
    assert len(device.log) == 2, "nothing is under way any more"


def test_the_writer_waits_until_both_copies_have_arrived(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[torch.device] = []
    monkeypatch.setattr(staging, "use_device", used.append)
    copies = stager(device, "weight")
    copies.stage(state())
    device.log.clear()
    copies.synchronize_staging()
    assert device.log == ["the writer waits for steps 1", "the writer waits for copies 1"]
    assert used == [CPU]


def test_locked_memory_and_the_stream_are_kept_from_save_to_save(device: Device) -> None:
    copies = stager(device, "weight", "bias")
    first = copies.stage(state())
    copies.written()
    device.log.clear()
    again = copies.stage(state())
    assert again["weight"] is first["weight"]
    assert not [line for line in device.log if line.startswith("room")]
    assert device.num_streams == 1
    copies.close()
    assert copies.num_bytes == 0


@pytest.mark.parametrize("other", [torch.ones(5), torch.ones(4, dtype=torch.float64)])
def test_a_tensor_of_another_form_gets_room_of_its_own(device: Device, other: torch.Tensor) -> None:
    copies = stager(device, "weight", "bias")
    copies.stage(state())
    staged = copies.stage({**state(), "weight": other})
    assert (staged["weight"].shape, staged["weight"].dtype) == (other.shape, other.dtype)
    assert device.log.count("room locked") == 4
    assert set(copies.stage({"bias": torch.ones(2)})) == {"bias"}, "only what is asked for"


def test_a_weight_that_moves_while_it_is_copied_spoils_that_save_and_makes_the_next_wait(
    device: Device,
) -> None:
    copies = stager(device, "weight", "bias")
    tensors = state()
    copies.stage(tensors)
    tensors["mean"].add_(1)  # it may, in a forward
    copies.synchronize_staging()
    tensors["bias"].add_(1)
    with pytest.raises(RuntimeError, match="^bias was changed while it was being copied$"):
        copies.synchronize_staging()
    device.log.clear()
    copies.stage(tensors)
    assert device.log[-1] == "steps waits for copies 2", "waited for at once"
    assert not copies.is_copying
    tensors["bias"].add_(1)
    copies.synchronize_staging()


def test_a_change_that_came_too_early_is_noticed_by_the_step_as_well(device: Device) -> None:
    copies = stager(device, "weight")
    tensors = state()
    copies.stage(tensors)
    tensors["weight"].add_(1)
    copies.before_change()
    with pytest.raises(RuntimeError, match="weight was changed"):
        copies.synchronize_staging()


def test_a_host_that_cannot_lock_memory_is_told_of_once(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty
    tried: list[bool] = []

    def cannot(*args: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        tried.append(pin_memory)
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nand much more")
        return empty(*args, **more)

    monkeypatch.setattr(torch, "empty", cannot)
    copies = stager(device, "weight", "bias")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        staged = copies.stage(state())
    assert [str(each.message) for each in said] == [
        "no page-locked memory for checkpoint copies (CUDA error: out of memory): "
        "steps wait for them"
    ]
    assert tried == [True, False, False, False]
    assert staged["weight"].tolist() == [1.0] * 4


def test_unless_somebody_says_otherwise_anything_may_change_in_a_forward(device: Device) -> None:
    copies = CopyInMemory(device)  # type: ignore[arg-type]
    copies.stage(state())
    assert [line for line in device.log if line.startswith("copy")] == ["copy 3"]
    assert not copies.is_copying


def test_changes_in_place_are_counted() -> None:
    tensor = torch.ones(2)
    before = version_of(tensor)
    tensor.add_(1)
    assert version_of(tensor) == before + 1


def test_of_no_tensors_nothing_is_copied_and_of_some_only_those_named() -> None:
    targets = {"a": torch.zeros(2), "b": torch.zeros(2)}
    sources = {"a": torch.ones(2, requires_grad=True), "b": torch.ones(2)}
    _copy(targets, sources, (), non_blocking=False)
    _copy(targets, sources, ["a"], non_blocking=True)
    assert (targets["a"].tolist(), targets["b"].tolist()) == ([1.0, 1.0], [0.0, 0.0])
    assert not targets["a"].requires_grad
