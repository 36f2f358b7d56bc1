"""The weights a run starts with: the same in every layout, to the bit, and made part by part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from drivetrain.config.load import resolve
from drivetrain.core.errors import ConfigError
from drivetrain.data.keys import INIT, fold
from drivetrain.data.sources import source_from
from drivetrain.testing import run_ranks
from drivetrain.train.assemble import assemble
from drivetrain.train.saving.weights import weights_sha256
from drivetrain.train.task import Task
from drivetrain.train.weights import recording
from tests.ranks.matrix import LAYOUTS
from tests.ranks.models import task_of
from tests.ranks.training import settings

NAMES = ["ddp", "fsdp", "hsdp", "fsdp×tp", "fsdp×pp interleaved", "tp×pp"]
KEPT: list[torch.Tensor] = []


def kept_elsewhere(make: Any) -> nn.Module:
    """What a recording cannot find."""
    model: nn.Module = make()
    KEPT.append(next(model.parameters()).detach())
    return model


def start(task: Task, data: Any, output_dir: str, parallel: Any, **changes: Any) -> tuple[str, Any]:
    config = settings(output_dir, parallel=parallel, micro_batch_size=2, **changes)
    resolved = resolve(config)
    assembly = assemble(task, resolved, source_from(data, resolved.config.data))
    assert not any(p.is_meta for p in assembly.engine.model.parameters())
    return digest_of(assembly.engine.spread.full_state()), assembly.notes


def digest_of(state: dict[str, Any]) -> str:
    return weights_sha256(dict(sorted(state.items())))  # stages come in another order


def start_layouts(output_dir: str) -> dict[str, dict[str, str]]:
    recording.SMALL = 0  # these models are small
    found: dict[str, dict[str, str]] = {}
    task, data = task_of("gpt")
    for name in NAMES:
        found[name] = {
            how: start(task, data, output_dir, LAYOUTS[name][1], model={"initialization": how})[0]
            for how in ("sequential", "keyed")
        }
    odd = Task(lambda: kept_elsewhere(task.model), task.loss)
    digest, notes = start(odd, data, output_dir, LAYOUTS["fsdp×tp"][1])
    assert any("cannot be built shard by shard (NotRecordable: " in note for note in notes), notes
    found["in turns"] = {"sequential": digest}
    return found


def start_from_files(output_dir: str, folder: str) -> dict[str, str]:
    recording.SMALL = 0
    task, data = task_of("gpt")
    found = {}
    for name in ("ddp", "hsdp", "fsdp×tp", "tp×pp"):
        read = {"pretrained": folder}
        found[name], notes = start(task, data, output_dir, LAYOUTS[name][1], model=read)
        assert any("pretrained weights from" in note for note in notes)
    with pytest.raises(ConfigError, match="no place for head.bias, head.weight"):
        headless = Task(lambda: headless_gpt(task.model), task.loss)
        start(headless, data, output_dir, LAYOUTS["hsdp"][1], model={"pretrained": folder})
    return found


def headless_gpt(make: Any) -> nn.Module:
    model: nn.Module = make()
    model.head = nn.Identity()
    return model


def save_in_two_files(folder: Path) -> str:
    """A model's weights, as a Hugging Face folder has them; their digest."""
    task, _ = task_of("gpt")
    state = dict(sorted(task.model().state_dict().items()))
    halves = [list(state)[::2], list(state)[1::2]]
    index: dict[str, str] = {}
    for number, names in enumerate(halves):
        file = f"model-{number}.safetensors"
        save_file({name: state[name] for name in names}, folder / file)
        index |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return digest_of(state)


def check_pretrained(folder: Path, backend: str = "gloo") -> None:
    """Every layout starts from the files' bits, on the ranks' devices."""
    expected = save_in_two_files(folder)
    args = (str(folder / "runs"), str(folder))
    found = run_ranks(start_from_files, 4, 300, args, backend)[0]
    assert found == dict.fromkeys(found, expected)


def check_first_weights(folder: Path, backend: str = "gloo") -> None:
    """Every layout starts from plain torch's bits, or from one and the same other."""
    task, _ = task_of("gpt")
    torch.manual_seed(fold(42, INIT))
    expected = digest_of(task.model().state_dict())
    found = run_ranks(start_layouts, 4, 300, (str(folder),), backend)[0]
    assert {name: by["sequential"] for name, by in found.items()} == dict.fromkeys(found, expected)
    keyed = {by["keyed"] for by in found.values() if "keyed" in by}
    assert len(keyed) == 1
    assert expected not in keyed


@pytest.mark.slow
def test_every_layout_starts_from_pretrained_files(tmp_path: Path) -> None:
    check_pretrained(tmp_path)


@pytest.mark.slow
def test_every_layout_starts_from_the_weights_of_plain_torch(tmp_path: Path) -> None:
    check_first_weights(tmp_path)
