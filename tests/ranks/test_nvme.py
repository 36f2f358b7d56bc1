"""ZeRO with optimizer state and weights on a disk: the same numbers, and checkpoints that go on."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.cpp_extension import _get_build_directory

from drivetrain.core.errors import WorkerFailure
from drivetrain.record import session
from drivetrain.strategies.deepspeed.offload import own_folder
from drivetrain.testing import run_ranks
from drivetrain.train.hooks import Hook
from drivetrain.train.saving.weights import weights_sha256
from drivetrain.train.trainer import Trainer
from tests.gpt_task import gpt_task
from tests.ranks.resuming import Interrupted
from tests.ranks.training import assert_same_training, sentences, settings

pytestmark = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="pip install 'drivetrain[deepspeed]'"
)
built = pytest.mark.skipif(
    not Path(_get_build_directory("async_io", False), "async_io.so").exists(),
    reason="`make nvme` builds DeepSpeed's async_io; it needs libaio-dev",
)

STEPS, SAVED = 30, 15
# DeepSpeed leaves pieces below 1 MiB in memory: at this width two of a block's matrices are larger,
# and sub-groups of this size are of both kinds.
WIDTH = 384
ZERO = {
    "stage3_param_persistence_threshold": 0,
    "sub_group_size": 1_000_000,
    "offload_param": {"max_in_cpu": 0},
}
DDP: dict[str, Any] = {"strategy": "ddp"}


def on_disk(disk: str, **offload: str) -> dict[str, Any]:
    zero = ZERO if "offload_param" in offload else {k: v for k, v in ZERO.items() if "off" not in k}
    details = {"zero_stage": 3, "nvme_path": disk, "config": {"zero_optimization": zero}}
    return {"strategy": "deepspeed", "deepspeed": {**details, **offload}}


class Watch(Hook):
    """Which files lie on the disk, and an early end."""

    def __init__(self, disk: Path, stop: int | None) -> None:
        self.disk, self.stop = disk, stop
        self.found: set[str] = set()

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        self.found |= {file.name for file in self.disk.rglob("*.swp")}
        if step - 1 == self.stop:
            raise Interrupted


def train(
    run_dir: str, disk: str, parallel: dict[str, Any], stop: int | None = None
) -> tuple[list[float], set[str]]:
    os.environ[session.RUN_DIR] = run_dir
    session._opened = 0
    checkpoint = {"every_steps": SAVED, "asynchronous": False}
    config = settings(run_dir, max_steps=STEPS, checkpoint=checkpoint, parallel=parallel)
    watch = Watch(Path(disk), stop)
    trainer = Trainer(gpt_task(width=WIDTH, layers=1), config, hooks=[watch])
    try:
        return trainer.fit(sentences()).losses, watch.found
    except Interrupted:
        return [], watch.found


def train_all(folder: str) -> dict[str, tuple[list[float], set[str]]]:
    disk = f"{folder}/disk"
    optimizer = on_disk(disk, offload_optimizer="nvme")
    both = on_disk(disk, offload_optimizer="nvme", offload_param="nvme")
    found = {
        "optimizer": train(f"{folder}/optimizer", disk, optimizer),
        "both": train(f"{folder}/both", disk, both),
    }
    for name, before, after in (
        ("both-both", both, both),
        ("both-ddp", both, DDP),
        ("ddp-both", DDP, both),
        ("optimizer-both", optimizer, both),
    ):
        train(f"{folder}/{name}", disk, before, stop=SAVED)
        found[name] = train(f"{folder}/{name}", disk, after)
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@built
def test_a_disk_changes_no_number_and_keeps_no_checkpoint_back(tmp_path: Path) -> None:
    reference, _ = run_ranks(train, 1, args=(str(tmp_path / "one"), str(tmp_path), DDP))[0]
    assert len(reference) == STEPS
    for found in run_ranks(train_all, 2, 800, args=(str(tmp_path),)):
        for name, (losses, _) in found.items():
            assert len(losses) == (SAVED if "-" in name else STEPS), name
            assert_same_training(losses, reference[-len(losses) :])
        on_the_disk = {name: " ".join(sorted(files)) for name, (_, files) in found.items()}
        assert "exp_avg_sq" in on_the_disk["optimizer"]
        assert "param" not in on_the_disk["optimizer"]
        assert "param.tensor" in on_the_disk["both"]
    whole, resumed = (
        weights_sha256(torch.load(tmp_path / name / "checkpoints" / "weights.pt"))
        for name in ("both", "both-both")
    )
    assert whole == resumed
    owner = Hook()  # these ranks end without ado; who comes next cleans up
    own_folder(tmp_path / "disk", owner)
    assert not list((tmp_path / "disk").rglob("*.swp"))


def test_a_missing_header_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A compiler that is told to forget where headers are has no libaio.h."""
    monkeypatch.setenv("CXX", "c++ -nostdinc")
    disk = str(tmp_path / "disk")
    parallel = on_disk(disk, offload_optimizer="nvme")
    with pytest.raises(WorkerFailure) as caught:
        run_ranks(train, 1, args=(str(tmp_path / "run"), disk, parallel))
    assert (
        "parallel.deepspeed: offload to nvme compiles DeepSpeed's async_io, which needs libaio.h, "
        "which was not found; apt-get install libaio-dev (dnf: libaio-devel), or offload to cpu"
    ) in str(caught.value)
