"""LoRA on a base that is read in shards: the same numbers, saved alone, merged on the way out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.testing import run_ranks
from drivetrain.train.trainer import Trainer
from tests.ranks.models import llama, task_of
from tests.ranks.training import settings

peft: Any = pytest.importorskip("peft")

LAYOUTS: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {"strategy": "fsdp"}}


def adapted() -> nn.Module:
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    model: nn.Module = peft.get_peft_model(llama(), config)
    return model


def train(folder: str, parallel: dict[str, Any], base: str) -> list[float]:
    """From the base, with the adapter and the merged model written at the end."""
    task, data = task_of("hf_llama")
    trainer = Trainer(
        replace(task, model=adapted),
        settings(
            folder,
            max_steps=4,
            parallel=parallel,
            global_batch_size=8,
            micro_batch_size=2,
            optimization={"learning_rate": 0.05},
            model={"pretrained": base},
            checkpoint={"contents": "trained", "every_steps": 2},
        ),
    )
    trainer.fit(data)
    trainer.save_pretrained(f"{folder}/adapter")
    trainer.save_pretrained(f"{folder}/merged", merge_adapter=True)
    return [step.loss for step in trainer.history.steps] if trainer.history else []


def both(folder: str) -> dict[str, list[float]]:
    base = f"{folder}/base"
    return {name: train(f"{folder}/{name}", parallel, base) for name, parallel in LAYOUTS.items()}


def on_one_rank(folder: str) -> list[float]:
    """A base for all, and the training on one process."""
    torch.manual_seed(11)
    base: Any = llama()
    base.save_pretrained(f"{folder}/base")
    return train(f"{folder}/alone", {}, base=f"{folder}/base")


def look(folder: str) -> str:
    """At what was written, and at what is refused."""
    for name in LAYOUTS:
        check_files(Path(folder) / "base", Path(folder) / name)
    try:
        merge_nothing(Path(folder))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(240)
def test_an_adapter_on_a_base_in_shards(tmp_path: Path) -> None:
    folder = (str(tmp_path),)
    (alone,) = run_ranks(on_one_rank, 1, 100, folder)
    for losses in run_ranks(both, 2, 200, folder)[0].values():
        assert losses == pytest.approx(alone, rel=1e-5)
    assert "has no peft adapter to merge" in run_ranks(look, 1, 100, folder)[0]


def check_files(base: Path, written: Path) -> None:
    """The adapter on the base, and the merged model, compute the same."""
    transformers: Any = pytest.importorskip("transformers")
    load = transformers.AutoModelForCausalLM.from_pretrained
    ids = torch.arange(12).view(1, -1)
    with torch.no_grad():
        plain = load(base)(input_ids=ids).logits
        adapted = peft.PeftModel.from_pretrained(load(base), written / "adapter")
        with_adapter = adapted(input_ids=ids).logits
        merged = load(written / "merged")(input_ids=ids).logits
    assert not torch.allclose(plain, with_adapter, atol=1e-3)
    torch.testing.assert_close(merged, with_adapter)
    sizes = [each.stat().st_size for each in (written / "adapter").glob("*.safetensors")]
    assert sum(sizes) < 0.2 * (base / "model.safetensors").stat().st_size


def merge_nothing(folder: Path) -> None:
    task, data = task_of("hf_llama")
    trainer = Trainer(task, settings(str(folder / "plain"), max_steps=1, optimization={}))
    trainer.fit(data)
    trainer.save_pretrained(folder / "x", merge_adapter=True)
