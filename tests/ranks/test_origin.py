"""What a run goes on from, where that is not its own directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.record import session
from drivetrain.train.trainer import Trainer
from tests.ranks.small_task import samples, small_task


def train(folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int, **rule: Any) -> int:
    """A run of its own; the step it went on from."""
    monkeypatch.setattr(session, "_opened", 0)
    trainer = Trainer(
        small_task(8),
        {
            "global_batch_size": 8,
            "max_steps": steps,
            "output_dir": str(folder),
            "checkpoint": {"every_steps": 2, **rule},
            "record": {"progress": "none", "sinks": []},
        },
    )
    return trainer.fit(samples()).resumed_step or 0


def test_a_new_run_does_not_write_among_anothers_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = str(tmp_path / "shared")
    train(tmp_path / "first", monkeypatch, 4, directory=shared)
    with pytest.raises(ConfigError, match="holds checkpoints of another run"):
        train(tmp_path / "second", monkeypatch, 8, directory=shared)
    went_on = train(tmp_path / "third", monkeypatch, 8, directory=shared, resume_from=shared)
    assert went_on == 4


@pytest.mark.parametrize("where", ["", "checkpoints"])
def test_another_runs_newest_checkpoint_is_found_from_either_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    train(tmp_path / "first", monkeypatch, 4)
    (run,) = (tmp_path / "first").iterdir()
    assert train(tmp_path / "second", monkeypatch, 8, resume_from=str(run / where)) == 4


def test_where_there_is_none_to_go_on_from_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="there is no good checkpoint"):
        train(tmp_path / "runs", monkeypatch, 4, resume_from=str(tmp_path / "nothing"))
