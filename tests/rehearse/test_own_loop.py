"""A loop of one's own cannot be rehearsed, and that is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.rehearse.client import RehearsalRequest, rehearse

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from drivetrain import load_config, prepare

config = load_config(defaults={"global_batch_size": 8, "max_steps": 1})
try:
    prepare(nn.Linear(4, 2), None, TensorDataset(torch.zeros(32, 4)), config)
except Exception:
    raise SystemExit("a script's own except must not see it")
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_loop_of_ones_own_is_refused_in_words(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    refusal = r"^SCRIPT = .*: trains in its own loop \(prepare\), which cannot be rehearsed; use"
    with pytest.raises(ConfigError, match=refusal) as refused:
        rehearse(RehearsalRequest((str(script),), 8))
    assert refused.value.exit_code == 2
