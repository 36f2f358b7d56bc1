"""A loop of one's own knows which step ends an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from drivetrain import prepare
from tests.ranks.resuming import Interrupted, go_on_in


def data() -> TensorDataset:
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).long())


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(data())


@pytest.fixture
def config(quiet: dict[str, Any]) -> dict[str, Any]:
    checkpoint = {"every_steps": 1, "asynchronous": False}
    return {"global_batch_size": 8, "num_train_epochs": 3, "checkpoint": checkpoint, **quiet}


def ends(config: dict[str, Any], source: Any, fails_at: int = 99) -> list[tuple[int, bool]]:
    """By step, whether it ended an epoch."""
    loop, seen = prepare(lambda: nn.Linear(4, 2), None, source, config), []
    for step in loop.steps():
        for x, y in step:
            loop.backward(F.cross_entropy(loop.model(x), y))
        loop.step()
        seen.append((loop.step_number, loop.ends_epoch))
        if loop.step_number == fails_at:
            raise Interrupted
    return seen


def test_the_last_and_smaller_step_does(config: dict[str, Any]) -> None:
    assert ends(config, data()) == [(n, n % 3 == 0) for n in range(1, 10)]


def test_a_step_is_shown_before_its_evaluation(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"progress": "plain", "sinks": [], "logging_steps": 100}
    loop = prepare(lambda: nn.Linear(4, 2), None, data(), {**config, "record": record})
    for step in loop.steps():
        for x, y in step:
            loop.backward(F.cross_entropy(loop.model(x), y))
        loop.step()
        if loop.ends_epoch:
            loop.evaluate(data(), lambda model, batch: {"loss": model(batch[0]).mean()})
    lines = capsys.readouterr().out.splitlines()
    last = [line.partition("  ")[0] for line in lines if line.startswith("step 9")]
    assert last == ["step 9/9", "step 9"]
    assert [metrics.step for metrics in loop.history.steps] == list(range(1, 10))


def test_also_after_a_resume_in_an_epoch(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on_in(tmp_path / "run", monkeypatch)
    with pytest.raises(Interrupted):
        ends(config, data(), fails_at=5)
    go_on_in(tmp_path / "run", monkeypatch)
    found = ends(config, data())
    assert found[0][0] > 3
    assert found == [(n, n % 3 == 0) for n in range(found[0][0], 10)]


def printed(config: dict[str, Any], every: int, fails_at: int = 99) -> list[tuple[int, int]]:
    """By step, the newest step whose loss a script can print then."""
    record = {"progress": "none", "sinks": [], "logging_steps": 2}
    loop = prepare(lambda: nn.Linear(4, 2), None, data(), {**config, "record": record})
    seen = []
    for step in loop.steps():
        for x, y in step:
            loop.backward(F.cross_entropy(loop.model(x), y))
        loop.step()
        if loop.step_number % every == 0:
            seen.append((loop.step_number, loop.history.steps[-1].step))
        if loop.step_number == fails_at:
            raise Interrupted
    return seen


def test_a_script_can_print_the_loss_of_the_step_it_has_just_made(config: dict[str, Any]) -> None:
    assert printed(config, every=2) == [(2, 2), (4, 4), (6, 6), (8, 8)]
    assert printed(config, every=3) == [(3, 2), (6, 6), (9, 8)]


def test_also_in_the_first_step_after_a_resume(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a script that prints the newest loss would end only if it had been killed before."""
    go_on_in(tmp_path / "run", monkeypatch)
    with pytest.raises(Interrupted):
        printed(config, every=3, fails_at=5)
    go_on_in(tmp_path / "run", monkeypatch)
    found = printed(config, every=1)
    first = found[0][0]
    assert first > 3
    assert found[0] == (first, first)
    assert found[-1] == (9, 8)


def test_before_a_step_none_has_ended(config: dict[str, Any]) -> None:
    loop = prepare(lambda: nn.Linear(4, 2), None, data(), config)
    assert not loop.ends_epoch
    assert loop.config.global_batch_size == 8


def test_a_stream_cannot_tell_before_the_next_one_begins(config: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="compare loop.epoch with the previous step's"):
        ends(config, Stream())


@pytest.mark.parametrize("leaves", [False, True])
def test_a_loop_over_epochs_around_it_is_told_that_one_call_covers_all(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str], leaves: bool
) -> None:
    config = {**config, "record": {"progress": "plain", "sinks": []}, "name": "kept"}
    loop = prepare(lambda: nn.Linear(4, 2), None, data(), config)
    seen = []
    for epoch in range(3):
        for step in loop.steps():
            for x, y in step:
                loop.backward(F.cross_entropy(loop.model(x), y))
            loop.step()
            seen.append(epoch)
            if leaves and loop.ends_epoch:
                break
    assert seen == [0] * (3 if leaves else 9)
    end = "step 3 (the script left its loop)" if leaves else "step 9"
    said = f"warning: loop.steps() was called again after the run's end at {end}: it yields nothing"
    shown = capsys.readouterr().out
    assert shown.count(said) == 1
    assert "already finished" not in shown
    assert [path.name for path in Path(config["output_dir"]).iterdir()] == ["kept"]
