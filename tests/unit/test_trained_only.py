"""checkpoint.contents=trained of a model whose frozen weights have several names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain import prepare
from drivetrain.checkpoint.catalogue import read_manifest
from drivetrain.checkpoint.storage import storage_at
from tests.ranks.resuming import Interrupted, go_on_in


class Tied(nn.Module):
    """A frozen embedding that is the head, too, and an adapter between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.adapter = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.tokens.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.adapter(self.tokens(x)))


def train(config: dict[str, Any], fails_at: int | None) -> Path:
    data = [torch.tensor(i % 16) for i in range(32)]
    loop = prepare(Tied, None, data, config)
    for step in loop.steps():
        for batch in step:
            loop.backward(F.cross_entropy(loop.model(batch), batch))
        if loop.step_number == fails_at:
            raise Interrupted
        loop.step()
    assert loop.history.run_dir is not None
    return loop.history.run_dir


def test_tied_weights_of_a_frozen_base_are_left_out_by_every_name(
    quiet: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the names was saved; loading it was taken for a change, and the base saved as well."""
    saving = {
        "contents": "trained",
        "every_steps": 2,
        "keep_last": 9,
        "asynchronous": False,
    }
    config = {"global_batch_size": 4, "max_steps": 8, **quiet, "checkpoint": saving}
    go_on_in(tmp_path / "run", monkeypatch)
    with pytest.raises(Interrupted):
        train(config, fails_at=5)
    go_on_in(tmp_path / "run", monkeypatch)
    storage = storage_at(str(train(config, fails_at=None) / "checkpoints"))
    folders = ["step-000000004-a1", "step-000000006-a2", "step-000000008-a2"]
    manifests = [read_manifest(storage, folder) for folder in folders]
    for manifest in manifests:
        assert set(manifest.values["frozen"]) == {"model.tokens.weight", "model.head.weight"}
