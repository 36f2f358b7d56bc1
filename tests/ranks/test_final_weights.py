"""What a run leaves when its model is never whole on a rank: files, each written by one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from drivetrain.checkpoint import export
from drivetrain.checkpoint.storage import LocalStorage
from drivetrain.cli.main import app
from drivetrain.core.errors import NotSaved
from drivetrain.parallel.model import ParallelModel
from drivetrain.testing import run_ranks
from drivetrain.train.saving.weights import read_weights, weights_sha256
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer
from tests.ranks.models import gpt2, hugging_face_loss, llama, sequences
from tests.ranks.training import settings

FSDP = {"strategy": "fsdp"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": FSDP,
    "fsdp and tp": {**FSDP, "tp": 2},
    "fsdp and pp": {**FSDP, "pp": 2},
}
INDEX = "model.safetensors.index.json"
WHOLE = ParallelModel.full_state


def config(output_dir: str, parallel: dict[str, Any], **more: Any) -> dict[str, Any]:
    given = {"global_batch_size": 8, "micro_batch_size": 2, "max_steps": 2, "optimization": {}}
    return settings(output_dir, **{**given, "parallel": parallel, **more})


def reloaded(folder: Path) -> str:
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    model: nn.Module = load(folder)
    return weights_sha256(model.state_dict())


def says(*words: object) -> None:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, words)])
    if result.exception is not None:
        raise result.exception


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("gathered whole on a rank")


def trained(
    output_dir: str, parallel: dict[str, Any], make: Any = llama, **more: Any
) -> tuple[Path, str]:
    """A run's checkpoints, and the digest of what it has trained, gathered after its end."""
    trainer = Trainer(Task(make, hugging_face_loss), config(output_dir, parallel, **more))
    ParallelModel.full_state = refuse  # type: ignore[method-assign, assignment]
    try:
        trainer.fit(sequences(), sequences())
    finally:
        ParallelModel.full_state = WHOLE  # type: ignore[method-assign]
    state = trainer.full_state_dict()
    assert trainer.run_dir is not None
    dist.barrier()
    return trainer.run_dir / "checkpoints", weights_sha256(state) if state else ""


def tied() -> nn.Module:
    make: Any = gpt2
    model: nn.Module = make(tie_word_embeddings=True)
    return model


def through_every_layout(output_dir: str) -> None:
    export.LEAST_SHARD_BYTES = 30_000
    is_first = dist.get_rank() == 0
    for name, parallel in LAYOUTS.items():
        saves = {"every_steps": 1, "keep_best": "loss", "final_weights": "sharded"}
        checked = {"checkpoint": saves, "evaluation": {"every_steps": 1}}
        folder, digest = trained(output_dir, parallel, **checked)
        if not is_first:
            continue
        index = json.loads((folder / "weights" / INDEX).read_text())
        files = {*index["weight_map"].values()}
        others = {INDEX, "config.json", "generation_config.json"}
        assert len(files) > 2, name
        assert {*os.listdir(folder / "weights")} == {*files, *others}, name
        assert weights_sha256(read_weights(folder)) == digest, name
        assert reloaded(folder / "weights") == digest, name
        says("export", folder, Path(output_dir, f"best-{name}"), "--best")
        best = load_file(Path(output_dir, f"best-{name}", "model.safetensors"))
        assert weights_sha256(read_weights(folder, "best")) == weights_sha256(best), name
        assert not (folder / "weights.pt").exists()
        assert not (folder / "best.pt").exists()
    others_saves: list[dict[str, Any]] = [{"every_steps": None}, {"save": "full"}]
    for given in others_saves:
        given |= {"final_weights": "sharded"}
        folder, digest = trained(output_dir, FSDP, tied, checkpoint=given)
        assert not is_first or reloaded(folder / "weights") == digest, given
        assert not (folder / "weights-in-pieces").exists()


def out_and_in(output_dir: str) -> None:
    """Exported, begun with, exported: the same bits, in any layout that reads or writes them."""
    folder, digest = trained(output_dir, FSDP, checkpoint={"final_weights": "sharded"})
    base = str(folder / "weights")
    steady = {"learning_rate": 1e-300}  # nothing, in single precision
    for parallel in ({"pp": 2}, FSDP):
        again, after = trained(
            output_dir,
            parallel,
            model={"pretrained": base},
            max_steps=1,
            optimization=steady,
            checkpoint={"final_weights": "sharded"},
        )
        assert after == digest, parallel
        if dist.get_rank() == 0:
            assert weights_sha256(read_weights(again)) == digest, parallel
            target = Path(output_dir, f"exported-{again.parent.name}")
            says("export", again, target)
            assert weights_sha256(load_file(target / "model.safetensors")) == digest, parallel


def full_disk(output_dir: str) -> str:
    """Rank 1 cannot write its files: nobody takes the folder for whole."""
    export.LEAST_SHARD_BYTES = 30_000
    if dist.get_rank() == 1:
        write = LocalStorage.writing

        def writing(self: LocalStorage, name: str) -> Any:
            if name.endswith(".safetensors"):
                raise OSError(28, "No space left on device")
            return write(self, name)

        LocalStorage.writing = writing  # type: ignore[method-assign]
    with pytest.raises(NotSaved, match=r"/weights \(OSError: .*No space left on device\)") as told:
        trained(output_dir, FSDP, checkpoint={"final_weights": "sharded"})
    return str(told.value)


@pytest.mark.slow
@pytest.mark.long
def test_files_come_from_all_ranks_and_load_as_they_are(tmp_path: Path) -> None:
    run_ranks(through_every_layout, 4, args=(str(tmp_path),))


def test_a_round_trip_is_bit_equal(tmp_path: Path) -> None:
    run_ranks(out_and_in, 2, args=(str(tmp_path),))


def test_a_rank_that_cannot_write_is_everyones_problem(tmp_path: Path) -> None:
    first, second = run_ranks(full_disk, 2, args=(str(tmp_path),))
    assert first == second
    (weights,) = tmp_path.glob("*/checkpoints/weights")
    assert INDEX not in os.listdir(weights)
