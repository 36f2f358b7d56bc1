"""Whole weights out of a model over the ranks: a state dict, and a Hugging Face model's folder."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import drivetrain
from drivetrain.cli.main import app
from drivetrain.testing import run_ranks
from drivetrain.train.saving.weights import weights_sha256
from drivetrain.train.trainer import Trainer
from tests.ranks.models import gpt2, hugging_face_loss, llama, sequences, task_of
from tests.ranks.training import settings

FSDP = {"strategy": "fsdp"}
LAYOUTS: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": FSDP, "tp": {"tp": 2}, "pp": {"pp": 2}}


def config(output_dir: str, parallel: dict[str, Any], **more: Any) -> dict[str, Any]:
    batches: dict[str, Any] = {"global_batch_size": 8, "micro_batch_size": 2, "optimization": {}}
    return settings(output_dir, max_steps=2, parallel=parallel, **batches, **more)


def says(*words: object) -> None:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, words)])
    if result.exception is not None:
        raise result.exception


def reloaded(folder: str) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    model: nn.Module = load(folder)
    return model.state_dict()


def through_every_layout(output_dir: str) -> None:
    """A Trainer of a Llama; what comes out is what `weights.pt` has, and loads as it is."""
    for name, parallel in LAYOUTS.items():
        task, data = task_of("hf_llama")
        task = replace(task, tokenizer=_Tokenizer())
        saves = {"every_steps": 1, "keep_best": "loss"}
        evaluation = {"every_steps": 1}
        settled = config(output_dir, parallel, checkpoint=saves, evaluation=evaluation)
        trainer = Trainer(task, settled)
        trainer.fit(data, data)
        state = trainer.full_state_dict()
        folder = f"{output_dir}/{name}"
        trainer.save_pretrained(folder, max_shard_gb=3e-5)
        if dist.is_initialized() and dist.get_rank():
            assert state == {}
            continue
        assert trainer.run_dir is not None
        final = torch.load(trainer.run_dir / "checkpoints" / "weights.pt", weights_only=True)
        assert state.keys() == llama().state_dict().keys(), name
        digest = weights_sha256(final)
        assert weights_sha256(state) == digest, name
        assert weights_sha256(reloaded(folder)) == digest, name
        index = json.loads(Path(folder, "model.safetensors.index.json").read_text())
        files = {*index["weight_map"].values()}
        assert len(files) > 2
        names = {"config.json", "generation_config.json", "tokenizer.json"}
        assert {*os.listdir(folder)} == {*files, *names, "model.safetensors.index.json"}
        assert json.loads(Path(folder, "config.json").read_text())["architectures"] == [
            "LlamaForCausalLM"
        ]
        exported = f"{output_dir}/exported-{name}"
        says("export", trainer.run_dir, exported, "--best", "--format", "huggingface")
        assert {*os.listdir(exported)} == {*names, "model.safetensors"}
        best = torch.load(trainer.run_dir / "checkpoints" / "best.pt", weights_only=True)
        assert weights_sha256(reloaded(exported)) == weights_sha256(best), name
        says("export", trainer.run_dir, f"{exported}-alone", "--format", "safetensors")
        assert os.listdir(f"{exported}-alone") == ["model.safetensors"]


def own_loop(output_dir: str) -> None:
    """A GPT-2 with one matrix under two names; written twice."""
    for name, parallel in (("ddp", {}), ("fsdp", FSDP)):
        tied: Any = gpt2
        model = tied(tie_word_embeddings=True)
        loop = drivetrain.prepare(model, None, sequences(), config(output_dir, parallel))
        folder = f"{output_dir}/loop-{name}"
        loop.save_pretrained(folder, max_shard_gb=3e-5)  # more files than the second time
        for step in loop.steps():
            for batch in step:
                loop.backward(hugging_face_loss(loop.model, batch))
            loop.step()
        state = loop.full_state_dict()
        loop.save_pretrained(folder, tokenizer=_Tokenizer())
        if not dist.is_initialized() or dist.get_rank() == 0:
            assert state.keys() == model.state_dict().keys()
            assert "lm_head.weight" in state
            assert weights_sha256(reloaded(folder)) == weights_sha256(state)
            assert {*os.listdir(folder)} == {
                "config.json",
                "generation_config.json",
                "model.safetensors",
                "tokenizer.json",
            }
            says("export", loop.history.run_dir, f"{folder}-exported")
            assert weights_sha256(reloaded(f"{folder}-exported")) == weights_sha256(state)
            written = load_file(Path(folder, "model.safetensors"))
            assert state.keys() - written.keys() == {"lm_head.weight"}  # one matrix once
        # a copy: what the script keeps does not change under its hands
        before = weights_sha256(state)
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.mul_(2)
        assert weights_sha256(state) == before


class _Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        Path(folder, "tokenizer.json").write_text("{}")


def compiled_by_the_script(output_dir: str) -> None:
    model = gpt2()
    compiled: Any = torch.compile(model)
    loop = drivetrain.prepare(compiled, None, sequences(), config(output_dir, FSDP))
    assert loop.full_state_dict().keys() == ({} if dist.get_rank() else model.state_dict()).keys()
    loop.save_pretrained(f"{output_dir}/compiled")


def everything(output_dir: str) -> None:
    through_every_layout(output_dir)
    own_loop(output_dir)
    compiled_by_the_script(output_dir)
    with pytest.raises(drivetrain.NotSaved, match="could not be written to .*NotADirectoryError"):
        file = Path(output_dir, "file")
        file.touch()
        trainer = trained(output_dir, "hf_llama")
        trainer.save_pretrained(file / "model")
    trainer = trained(output_dir, "gpt")
    with pytest.raises(drivetrain.ConfigError, match="is not a Hugging Face model"):
        trainer.save_pretrained(f"{output_dir}/gpt")
    with pytest.raises(drivetrain.ConfigError, match="no config of a Hugging Face model was kept"):
        says("export", trainer.run_dir, f"{output_dir}/gpt", "--format", "huggingface")


def trained(output_dir: str, name: str) -> Trainer:
    task, data = task_of(name)
    trainer = Trainer(task, config(output_dir, FSDP))
    with pytest.raises(RuntimeError, match="needs the model that fit"):
        trainer.full_state_dict()
    trainer.fit(data)
    return trainer


@pytest.mark.slow
@pytest.mark.long
def test_weights_leave_every_layout_whole_and_load_again(tmp_path: Path) -> None:
    run_ranks(everything, 2, 300, args=(str(tmp_path),))
