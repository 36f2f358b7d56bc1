"""Saves on the device: nothing is staged there, steps do not wait, and what is written is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from drivetrain.checkpoint import staging
from drivetrain.checkpoint.staging import CopyInMemory
from drivetrain.checkpoint.state import TrainingState
from drivetrain.core.errors import WorkerFailure
from drivetrain.parallel.accelerator import accelerator_of
from drivetrain.testing import run_ranks
from drivetrain.train.hooks import Hook
from drivetrain.train.saving.weights import weights_sha256
from drivetrain.train.trainer import Trainer
from tests.accelerator.layouts import GROUPS
from tests.accelerator.small_runs import batch_norm_task, run_in, samples, settings
from tests.ranks.test_incremental import LAYOUTS, good, on_two

sim = torch.get_device_module("sim")

COPY_S = 5e-3


class Memory(Hook):
    """What the device holds between two steps, while saves are under way."""

    def __init__(self) -> None:
        self.most: dict[int, int] = {}

    def on_train_batch_start(self, trainer: Trainer, step: int) -> None:
        sim.reset_peak_memory_stats()
        self.most[step - 1] = sim.memory_allocated()


def train(folder: str, steps: int, hook: Hook | None = None, **more: Any) -> str:
    run_in(folder)
    hooks = [] if hook is None else [hook]
    trainer = Trainer(batch_norm_task(), settings(steps, **more), hooks=hooks)
    trainer.fit(samples())
    assert trainer.assembly is not None
    return weights_sha256(trainer.assembly.engine.spread.full_state())


class _StopAfter(Hook):
    """Once the save of step 4 is written: on a busy machine it is still under way."""

    def __init__(self, step: int, folder: str) -> None:
        self._step = step
        self._written = Path(folder, "checkpoints", "step-000000004-a1", "manifest.json")

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        if step - 1 != self._step:
            return
        end_s = time.monotonic() + 5.0  # one that is given up never comes
        while not self._written.exists() and time.monotonic() < end_s:
            time.sleep(0.02)
        raise KeyboardInterrupt


def whole_and_resumed(
    folder: str, parallel: dict[str, Any], **more: Any
) -> tuple[str, str, dict[int, int]]:
    """Hashes of a run of 12 steps, and of one that was stopped after 6 and went back to step 4."""
    sim.set_op_cost(1e-4)
    sim.set_copy_cost(COPY_S)
    memory = Memory()
    whole = train(f"{folder}/whole", 12, memory, parallel=parallel, **more)
    with pytest.raises(KeyboardInterrupt):
        hook = _StopAfter(6, f"{folder}/parts")
        train(f"{folder}/parts", 12, hook, parallel=parallel, **more)
    return whole, train(f"{folder}/parts", 12, parallel=parallel, **more), memory.most


PARALLEL = {"ddp": {"strategy": "ddp"}, "fsdp": {"strategy": "fsdp"}}


@pytest.mark.parametrize("strategy", PARALLEL)
def test_what_is_written_while_steps_go_on_is_what_was_saved(tmp_path: Path, strategy: str) -> None:
    found = run_ranks(
        whole_and_resumed, 2, 500, (str(tmp_path), PARALLEL[strategy]), GROUPS["both"]
    )
    whole, resumed, held = found[0]
    assert whole == resumed
    assert held[4] <= 1.01 * held[3], "the device holds more while the save of step 4 is under way"
    assert held[8] <= 1.01 * held[7]


def without(names: list[str], body: Callable[..., Any], *args: Any) -> Any:
    """`body`, with parts of what a save waits for taken out.

    A save's copies take so long that even a step on a busy machine ends before them.
    """
    stage = CopyInMemory.stage

    def slowly(stager: CopyInMemory, state_dict: dict[str, Any]) -> dict[str, Any]:
        sim.set_copy_cost(20 * COPY_S)
        staged = stage(stager, state_dict)
        sim.set_copy_cost(COPY_S)
        return staged

    for name, part in {"stage": slowly, **dict.fromkeys(names, lambda *_: None)}.items():
        setattr(CopyInMemory, name, part)
    return body(*args)


@pytest.mark.parametrize(
    "names", [["before_change", "_look_for_changes"], ["synchronize_staging"]], ids=lambda n: n[0]
)
def test_without_a_synchronisation_the_numbers_are_wrong(tmp_path: Path, names: list[str]) -> None:
    args = (names, whole_and_resumed, str(tmp_path), PARALLEL["ddp"])
    try:
        whole, resumed, _ = run_ranks(without, 2, 500, args, GROUPS["both"])[0]
    except WorkerFailure as error:  # what was read back is no number
        whole, resumed = "", str(error)
    assert whole != resumed
    assert "Traceback" not in resumed or "NonFiniteLoss" in resumed


def test_a_save_of_weights_that_have_moved_is_refused(tmp_path: Path) -> None:
    args = (["before_change"], whole_and_resumed, str(tmp_path), PARALLEL["ddp"])
    whole, resumed, _ = run_ranks(without, 2, 500, args, GROUPS["both"])[0]
    assert whole == resumed
    events = (tmp_path / "whole/events/00000.jsonl").read_text()
    assert "was changed while it was being copied" in events


def test_staged_tensors_are_on_the_host_and_copied_beside_the_steps() -> None:
    device = torch.device("sim", 0)
    sim.set_device(device)
    sim.set_op_cost(0.01)
    sim.set_copy_cost(0.3)
    stager = CopyInMemory(accelerator_of(device))
    stager.changes_in_forward = lambda name: name == "statistics"
    state = {name: torch.ones(4, device=device) for name in ("weight", "statistics")}
    torch.accelerator.synchronize()
    sim.keep_intervals(True)
    staged = stager.stage(state)
    assert all(tensor.is_pinned() for tensor in staged.values())
    state["statistics"].add_(1)  # a forward
    (state["weight"] * 2).sum()
    stager.before_change()
    state["weight"].add_(1)
    stager.synchronize_staging()
    assert {name: tensor.tolist() for name, tensor in staged.items()} == {
        "weight": [1] * 4,
        "statistics": [1] * 4,
    }
    intervals = sim.take_intervals()
    sim.keep_intervals(False)
    beside = next(i for i in intervals if i.kind == "copy" and i.stream != 0)
    inside = [i for i in intervals if i.kind == "op" and i.start_s < beside.end_s]
    assert [i.name for i in inside] != [], "the steps went on while the copy ran"
    last = max(intervals, key=lambda i: i.start_s)
    assert last.start_s >= beside.end_s, "the weights moved only after it"


def test_weights_that_change_while_they_are_copied_are_not_written() -> None:
    device = torch.device("sim", 0)
    stager = CopyInMemory(accelerator_of(device))
    stager.changes_in_forward = lambda _: False
    state = {"weight": torch.ones(4, device=device)}
    stager.stage(state)
    state["weight"].add_(1)  # in a hook of the user's, say
    with pytest.raises(RuntimeError, match="weight was changed while it was being copied"):
        stager.synchronize_staging()
    staged = stager.stage(state)  # from now on it is waited for at once
    state["weight"].add_(1)
    stager.synchronize_staging()
    assert staged["weight"].tolist() == [2] * 4


def change_shards() -> str:
    """A user's hook changes shards in place while they are copied; what the save says to that."""
    mesh = init_device_mesh("sim", (dist.get_world_size(),))
    weight = distribute_tensor(torch.ones(4, 2, device="sim"), mesh, [Shard(0)])
    stager = CopyInMemory(accelerator_of(weight.device))
    stager.changes_in_forward = lambda _: False
    sim.set_copy_cost(0.3)
    stager.stage({"weight": weight.detach()})
    with torch.no_grad():
        weight.mul_(2)
    try:
        stager.synchronize_staging()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_shards_that_change_while_they_are_copied_are_not_written() -> None:
    said = run_ranks(change_shards, 2, backend=GROUPS["both"])
    assert said == ["weight was changed while it was being copied"] * 2


def test_weights_that_no_optimizer_has_may_change_in_a_forward() -> None:
    """A teacher's: averages of the student's, made through .data, which torch does not count."""
    device = torch.device("sim", 0)
    sim.set_copy_cost(0.05)
    student, teacher = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
    model = nn.ModuleDict({"student": student, "teacher": teacher}).to(device)
    state = TrainingState(model, torch.optim.SGD(student.parameters(), lr=0.1))
    stager = CopyInMemory(accelerator_of(device))
    stager.changes_in_forward = state.changes_in_forward()
    before = teacher.weight.tolist()
    staged = stager.stage(state.weights())
    teacher.weight.data.mul_(2)
    stager.synchronize_staging()
    assert staged["model.teacher.weight"].tolist() == before


def test_whoever_writes_uses_the_ranks_own_device() -> None:
    """A new thread is on device 0: on CUDA, waiting there would take memory of it for a context."""
    device = torch.device("sim", 3)
    sim.set_device(device)
    stager = CopyInMemory(accelerator_of(device))
    stager.stage({"weight": torch.ones(4, device=device)})

    def write() -> int:
        stager.synchronize_staging()
        return torch.accelerator.current_device_index()

    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(write).result() == 3
    sim.set_device(0)


def test_a_step_beside_the_writing_thread_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("sim", 0)
    stager = CopyInMemory(accelerator_of(device))
    stager.changes_in_forward = lambda _: False
    state = {str(index): torch.ones(4, device=device) for index in range(100)}
    stager.stage(state)
    version_of = staging.version_of

    def slowly(tensor: torch.Tensor) -> int:
        if current_thread() is not main_thread():
            time.sleep(2e-3)
        return version_of(tensor)

    monkeypatch.setattr(staging, "version_of", slowly)
    with ThreadPoolExecutor(1) as executor:
        writing = executor.submit(stager.synchronize_staging)
        time.sleep(0.02)  # it is looking through the versions now
        stager.before_change()
        for tensor in state.values():
            tensor.add_(1)
        writing.result()


def test_one_process_with_a_group_for_its_device_saves(tmp_path: Path) -> None:
    whole = run_ranks(train, 1, args=(str(tmp_path / "run"), 8), backend=GROUPS["device only"])
    assert len(whole[0]) == 64
    assert list(tmp_path.glob("run/checkpoints/step-*/manifest.json"))


def test_a_host_that_cannot_lock_its_memory_saves_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty = torch.empty

    def cannot_pin(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("pin_memory"):
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **kwargs)

    device = torch.device("sim", 0)
    sim.set_copy_cost(0.05)
    state = {name: torch.ones(4, device=device) for name in ("weight", "bias")}
    stager = CopyInMemory(accelerator_of(device))
    stager.changes_in_forward = lambda _: False
    monkeypatch.setattr(torch, "empty", cannot_pin)
    with pytest.warns(UserWarning, match="page-locked") as warned:
        staged = stager.stage(state)
    assert len(warned) == 1
    stager.before_change()
    for tensor in state.values():
        tensor.add_(1)
    stager.synchronize_staging()
    assert [tensor.tolist() for tensor in staged.values()] == [[1] * 4] * 2


def on_cpu(code: str) -> str:
    """In a process without the device."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_a_device_wrote_is_read_without_one(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    run_ranks(train, 2, args=(folder, 8), backend=GROUPS["both"])
    code = f"""
import glob, json, torch
from tests.accelerator.small_runs import resume
assert torch.accelerator.current_accelerator() is None
weights = torch.load(glob.glob({folder!r} + "/checkpoints/weights.pt")[0], weights_only=True)
print(json.dumps([sorted({{str(t.device) for t in weights.values()}}), resume({folder!r}, 12)]))
"""
    devices, losses = json.loads(on_cpu(code))
    assert devices == ["cpu"]
    assert len(losses) == 4
    assert all(loss > 0 for loss in losses)


def on_devices(folder: str, stops: bool, shift: int, more: dict[str, Any]) -> str:
    torch.accelerator.set_device_index(dist.get_rank() + shift)
    if not stops:
        return train(folder, 12, **more)
    with pytest.raises(KeyboardInterrupt):
        train(folder, 12, _StopAfter(8, folder), **more)
    return ""


@pytest.mark.parametrize(
    "more",
    [
        {"communication": {"compression": "topk"}},
        {"precision": {"dtype": "fp16"}},
        {"parallel": {"strategy": "local_sgd", "local_sgd": {"inner_steps": 3}}},
    ],
    ids=["topk", "fp16", "local_sgd"],
)
def test_own_states_resume_on_other_devices(tmp_path: Path, more: dict[str, Any]) -> None:
    def run(name: str, stops: bool, shift: int) -> list[str]:
        return run_ranks(
            on_devices, 2, args=(str(tmp_path / name), stops, shift, more), backend=GROUPS["both"]
        )

    whole = run("whole", False, 2)
    run("parts", True, 2)
    assert run("parts", False, 5)[0] == whole[0]


def test_an_incremental_save_resumes_to_the_last_bit(tmp_path: Path) -> None:
    found = run_ranks(on_two, 2, 500, (str(tmp_path),), GROUPS["both"])[0]
    for name in LAYOUTS:
        assert found[name] == found[f"{name} whole"] != ""
        newest, _ = good(tmp_path / name)
        assert newest.refers_to
