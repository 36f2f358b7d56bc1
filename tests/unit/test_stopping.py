"""When a run ends, which of its checkpoints is the best, and what is left of both."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from drivetrain import ConfigError, EarlyStopping, Hook, Task, Total, Trainer, open_run, prepare
from drivetrain.checkpoint.contract import Contract, ContractChanged
from drivetrain.cli import checkpoint as verbs
from drivetrain.record.status import status_of
from drivetrain.train.history import EvaluationResult, History
from drivetrain.train.keep_loop import KeptLoop
from tests.ranks.resuming import Interrupted, go_on_in

SCORES = {4: 0.5, 8: 0.8, 12: 0.5, 16: 0.9, 20: 0.4, 24: 0.9}


def data(length: int = 64) -> TensorDataset:
    x = torch.randn(length, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).long())


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Scored(Hook):
    """Evaluations that go up and down as the tests need it."""

    def __init__(self) -> None:
        self.step = 0

    def on_validation_start(self, trainer: Trainer, step: int) -> None:
        self.step = step

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        score = torch.tensor(100.0 * SCORES.get(self.step, 0.1))
        return {"loss": loss(model, batch), "accuracy": Total(score, 100)}


def make(config: dict[str, Any], *hooks: Hook, **changes: Any) -> Trainer:
    scored = Scored()
    task = Task(lambda: nn.Linear(4, 2), loss, metrics=scored.metrics)
    return Trainer(task, {**config, **changes}, [scored, *hooks])


@pytest.fixture
def config(quiet: dict[str, Any]) -> dict[str, Any]:
    saving = {"every_steps": 10, "keep_last": 1, "asynchronous": False}
    best = {"keep_best": "accuracy", "keep_best_mode": "max"}
    evaluation = {"every_steps": 4}
    steps = {"global_batch_size": 8, "max_steps": 40}
    return {**steps, "checkpoint": {**saving, **best}, "evaluation": evaluation, **quiet}


def saved(run_dir: Path | None) -> list[int]:
    assert run_dir is not None
    manifests = run_dir.glob("checkpoints/step-*/manifest.json")
    return sorted(json.loads(path.read_text())["step"] for path in manifests)


def test_the_best_evaluation_is_saved_and_kept(config: dict[str, Any], tmp_path: Path) -> None:
    """It was kept only where a save was due anyway: 16 is no multiple of 10."""
    trainer = make(config)
    history = trainer.fit(data(), data())
    assert saved(history.run_dir) == [16, 40]
    best = history.best("accuracy", mode="max")
    assert best is not None
    assert (best.step, best.metrics["accuracy"]) == (16, 0.9), "the first of equals"
    assert trainer.run_dir is not None
    verbs.export(str(trainer.run_dir), str(tmp_path / "best.pt"), None, 5.0, best=True)
    verbs.export(str(trainer.run_dir), str(tmp_path / "last.pt"), None, 5.0)
    beside = trainer.run_dir / "checkpoints"
    for exported, left in (("best.pt", "best.pt"), ("last.pt", "weights.pt")):
        found, expected = torch.load(tmp_path / exported), torch.load(beside / left)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(
        torch.load(beside / "best.pt")["weight"], torch.load(beside / "weights.pt")["weight"]
    )


class StopAt(Hook):
    def __init__(self, step: int) -> None:
        self.at = step

    def on_train_batch_start(self, trainer: Trainer, step: int) -> None:
        if step == self.at + 1 and trainer.history.resumed_step == 0:
            raise Interrupted


def test_the_best_is_known_after_a_resume(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(config, StopAt(33))
    with pytest.raises(Interrupted):
        first.fit(data(), data())
    assert first.run_dir is not None
    assert saved(first.run_dir) == [16, 30]
    go_on_in(first.run_dir, monkeypatch)
    assert saved(make(config).fit(data(), data()).run_dir) == [16, 40]


def exports_best(run_dir: Path | None, target: Path) -> bool:
    verbs.export(str(run_dir), str(target), None, 5.0, best=True)
    return target.exists()


def test_the_last_evaluation_is_known_although_its_step_was_saved_before(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """40 is a multiple of 10: saved, then evaluated for the first time, and best of none."""
    history = make(config, evaluation={"every_steps": 1000}).fit(data(), data())
    assert saved(history.run_dir) == [40]
    assert exports_best(history.run_dir, tmp_path / "best.pt")


class DiesBeforeEvaluation(Hook):
    def on_validation_start(self, trainer: Trainer, step: int) -> None:
        raise Interrupted


def test_an_evaluation_that_is_made_up_for_by_the_next_attempt_is_known(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config["evaluation"] = {"every_steps": 1000}
    first = make(config, DiesBeforeEvaluation())
    with pytest.raises(Interrupted):
        first.fit(data(), data())
    assert first.run_dir is not None
    assert saved(first.run_dir) == [40]
    go_on_in(first.run_dir, monkeypatch)
    history = make(config).fit(data(), data())
    assert exports_best(history.run_dir, tmp_path / "best.pt")


def test_an_evaluation_after_a_loop_of_ones_own_is_known(
    config: dict[str, Any], tmp_path: Path
) -> None:
    config["checkpoint"] = {"every_steps": 10, "keep_best": "loss"}
    loop = prepare(lambda: nn.Linear(4, 2), None, data(), config)
    for step in loop.steps():
        for batch in step:
            loop.backward(loss(loop.model, batch))
        loop.step()
    found = loop.evaluate(data(), lambda model, batch: {"loss": loss(model, batch)})
    run_dir = loop.history.run_dir
    assert exports_best(run_dir, tmp_path / "best.pt")
    assert run_dir is not None
    (manifest,) = (run_dir / "checkpoints").glob("step-*40-*/manifest.json")
    run = json.loads(manifest.read_text())["values"]["common"]["run"]["value"]
    assert [entry[:2] for entry in run["evaluations"]] == [[40, {"loss": found.metrics["loss"]}]]


def test_names_of_metrics_are_checked(config: dict[str, Any]) -> None:
    """A misspelt one was accepted, and nothing kept."""
    names = "no evaluation has this metric; use one of accuracy, loss"
    misspelt = {**config["checkpoint"], "keep_best": "acuracy"}
    with pytest.raises(ConfigError, match=f"checkpoint.keep_best = acuracy: {names}"):
        make(config, checkpoint=misspelt).fit(data(), data())
    with pytest.raises(ConfigError, match=f"EarlyStopping.monitor = val_loss: {names}"):
        make(config, EarlyStopping("val_loss")).fit(data(), data())
    history = History(evaluations=[EvaluationResult(1, {"loss": 1.0, "accuracy": 0.0}, 1)])
    with pytest.raises(ConfigError, match=f"metric = f1: {names}"):
        history.best("f1")
    assert History().best("f1") is None


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (data()[i] for i in range(20))


def test_a_best_that_could_not_be_kept_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"keep_best = accuracy: fit\(\) has no validation data"):
        make(config).fit(data())
    with pytest.raises(ConfigError, match=r"stream's epoch .*set evaluation\.every_steps"):
        make(config, evaluation={}).fit(Endless(), data())
    never = {**config["checkpoint"], "every_steps": None}
    with pytest.raises(ConfigError, match="keep_best = accuracy: nothing is saved"):
        make(config, checkpoint=never)
    plain = make(config, checkpoint={"every_steps": 10})
    plain.fit(data())
    with pytest.raises(ConfigError, match="--best: no evaluation of .* was marked as best"):
        verbs.export(str(plain.run_dir), "nowhere.pt", None, 5.0, best=True)


def test_early_stopping_saves_finishes_and_stays(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping = EarlyStopping("accuracy", patience=2, min_delta=0.05, mode="max")
    trainer = make(config, stopping)
    history = trainer.fit(data(), data())
    assert [result.step for result in history.evaluations] == [4, 8, 12, 16, 20, 24]
    assert history.stopped == "accuracy did not improve on 0.9 (after step 16) in 2 evaluations"
    assert saved(history.run_dir) == [16, 24]
    assert trainer.run_dir is not None
    assert (trainer.run_dir / "checkpoints" / "weights.pt").exists()
    run = open_run(trainer.run_dir)
    (end,) = [e for e in run.events(0) if e.name == "run_end"]
    assert (end.values["steps"], end.values["stopped"]) == (24, history.stopped)
    found = status_of(run, now_s=0.0)
    assert (found.state, found.reason) == ("finished", f"stopped: {history.stopped}")
    go_on_in(trainer.run_dir, monkeypatch)
    again = make(config, stopping).fit(data(), data())
    assert again.steps == [], "the same command, once more, trains nothing"
    assert again.stopped == history.stopped
    monkeypatch.delenv("DRIVETRAIN_RUN_DIR")
    resumed = {**config["checkpoint"], "resume_from": str(trainer.run_dir)}
    assert make(config, checkpoint=resumed).fit(data(), data()).steps[0].step == 25


def test_patience_counts_on_after_a_resume(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**config, "checkpoint": {"every_steps": 2, "asynchronous": False}}
    stopping = EarlyStopping("accuracy", patience=2, mode="max")
    first = make(config, stopping, StopAt(22))
    with pytest.raises(Interrupted):
        first.fit(data(), data())
    assert first.run_dir is not None
    go_on_in(first.run_dir, monkeypatch)
    history = make(config, stopping).fit(data(), data())
    assert (history.resumed_step, history.steps[-1].step) == (22, 24)


@pytest.mark.parametrize("form", ["whole", "sharded"])
def test_a_finished_run_that_is_started_again_says_so(
    config: dict[str, Any],
    form: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config["checkpoint"] = {"final_weights": form}
    config["record"] = {**config["record"], "progress": "plain"}
    first = make(config).fit(data(), data())
    assert first.run_dir is not None
    assert "already finished" not in capsys.readouterr().out
    go_on_in(first.run_dir, monkeypatch)
    assert make(config).fit(data(), data()).steps == []
    weights = first.run_dir / "checkpoints" / ("weights.pt" if form == "whole" else "weights")
    assert weights.exists()
    assert (
        "this run is already finished (step 40 of 40): nothing was trained; its weights are in "
        f"{weights}; to train longer, raise max_steps; to start over, use another run directory\n"
    ) in capsys.readouterr().out
    go_on_in(first.run_dir, monkeypatch)
    assert len(make(config, max_steps=44).fit(data(), data()).steps) == 4
    assert "already finished" not in capsys.readouterr().out


class Asks(Hook):
    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        if len(trainer.history.steps) >= 5:
            trainer.stop("enough")


def test_a_hook_stops_a_run_between_evaluations(config: dict[str, Any]) -> None:
    record = {**config["record"], "logging_steps": 1}
    history = make(config, Asks(), record=record).fit(data(), data())
    last = history.steps[-1].step
    assert 5 < last < 40
    assert (history.stopped, history.evaluations[-1].step) == ("enough", last)
    with pytest.raises(RuntimeError, match="while fit"):
        make(config).stop("now")


class Slow(Hook):
    def on_train_batch_start(self, trainer: Trainer, step: int) -> None:
        time.sleep(0.05)


def test_time_is_counted_over_attempts_and_more_can_be_given(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**config, "checkpoint": {"every_steps": 5, "asynchronous": False}}
    trainer = make(config, Slow(), max_time_s=0.5)
    history = trainer.fit(data())
    assert 0 < len(history.steps) < 40
    assert history.stopped == "max_time_s = 0.5 has elapsed"
    assert trainer.run_dir is not None
    go_on_in(trainer.run_dir, monkeypatch)
    assert make(config, Slow(), max_time_s=0.5).fit(data()).steps == []
    go_on_in(trainer.run_dir, monkeypatch)
    assert make(config, max_time_s=600).fit(data()).steps[-1].step == 40


def test_a_run_that_stops_at_steps_ends_with_the_bits_of_one_that_does_not(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedules go by the whole length: a rung of a search is no shorter run."""
    falling = {"lr_scheduler_type": "cosine", "warmup_ratio": 0.1}
    whole = make(config, optimization=falling).fit(data(), data())
    run_dir = None
    for stop, steps in ((8, 8), (8, 0), (24, 16), (None, 16)):
        if run_dir is not None:
            go_on_in(run_dir, monkeypatch)
        trainer = make(config, optimization=falling, stop_at_step=stop)
        history = trainer.fit(data(), data())
        run_dir = trainer.run_dir
        assert len(history.steps) == steps
        assert history.stopped.startswith(f"stop_at_step = {stop}" if stop else "")
        assert history.evaluations[-1].step == (stop or 40)
    assert whole.run_dir is not None
    assert run_dir is not None
    ends = [torch.load(d / "checkpoints/weights.pt") for d in (whole.run_dir, run_dir)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert [e.metrics for e in history.evaluations] == [e.metrics for e in whole.evaluations]


def test_early_stopping_of_the_config(config: dict[str, Any]) -> None:
    """By the same rule as the hook; in a loop of one's own, too."""
    said: dict[str, Any] = {"metric": "accuracy", "mode": "max", "patience": 2}
    history = make(config, early_stopping=said).fit(data(), data())
    assert history.stopped == "accuracy did not improve on 0.9 (after step 16) in 2 evaluations"
    assert history.evaluations[-1].step == 24
    said = {"metric": "accuracy", "mode": "max", "limits": [[6, 0.8], [10, "5.01e-1"]]}
    history = make(config, early_stopping=said).fit(data(), data())
    assert history.stopped == "accuracy was 0.5 at step 10, worse than 0.501"
    assert history.evaluations[-1].step == 12
    own = kept(config, early_stopping={"patience": 1}, checkpoint={"every_steps": 10})
    for step in own.steps():
        one(own, step)
        own.evaluate(data(), lambda _, batch: {"loss": Total(batch[1].sum() * 0.0 + 1, 1)})
    assert own.history.steps[-1].step == 2
    with pytest.raises(ConfigError, match="early_stopping: fit"):
        make(config, early_stopping={"patience": 1}).fit(data())
    with pytest.raises(ConfigError, match=r"early_stopping.metric = acc\b.*use one of accuracy"):
        make(config, early_stopping={"patience": 1, "metric": "acc"}).fit(data(), data())


def test_patience_that_ends_at_a_stop_ends_for_good(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a search that pauses there would train on where a run without a pause does not."""
    said: dict[str, Any] = {"metric": "accuracy", "mode": "max", "patience": 2}
    first = make(config, early_stopping=said, stop_at_step=24).fit(data(), data())
    assert first.stopped.startswith("accuracy did not improve")
    assert first.run_dir is not None
    go_on_in(first.run_dir, monkeypatch)
    assert make(config, early_stopping=said).fit(data(), data()).steps == []


def kept(config: dict[str, Any], **changes: Any) -> KeptLoop:
    config = {**config, "checkpoint": {"every_steps": 10, "asynchronous": False}, **changes}
    return prepare(lambda: nn.Linear(4, 2), None, data(), config)


def one(loop: KeptLoop, step: Any) -> None:
    for batch in step:
        loop.backward(loss(loop.model, batch))
    loop.step()


def by_break(loop: KeptLoop) -> None:
    for number, step in enumerate(loop.steps(), 1):
        one(loop, step)
        if number == 7:
            break


def by_return_from_a_block(loop: KeptLoop) -> None:
    with torch.enable_grad():
        for number, step in enumerate(Around(loop.steps()), 1):
            with torch.enable_grad():
                one(loop, step)
                if number == 7:
                    return


class Around:
    """As a progress bar does it: holds what it goes through."""

    def __init__(self, steps: Any) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[Any]:
        steps = self.steps
        try:
            for step in steps:  # noqa: UP028 - as tqdm has it
                yield step
        finally:
            pass


def by_islice(loop: KeptLoop) -> None:
    for step in itertools.islice(loop.steps(), 7):
        one(loop, step)


@pytest.mark.parametrize("leave", [by_break, by_return_from_a_block, by_islice])
def test_leaving_a_loop_ends_the_run_properly(
    leave: Any, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it was saved, and the next start went on training."""
    loop = kept(config, record={**config["record"], "logging_steps": 1})
    leave(loop)
    assert loop.history.run_dir is not None
    assert saved(loop.history.run_dir) == [7]
    events = [e for e in open_run(loop.history.run_dir).events(0) if e.kind == "instant"]
    assert (events[-1].name, events[-1].values["stopped"]) == (
        "run_end",
        "the script left its loop",
    )
    go_on_in(loop.history.run_dir, monkeypatch)
    again = kept(config)
    assert list(again.steps()) == []


def test_a_loop_that_an_error_has_left_has_failed(config: dict[str, Any]) -> None:
    loop = kept(config)

    def left() -> None:
        for number, step in enumerate(loop.steps(), 1):
            one(loop, step)
            if number == 7:
                raise Interrupted

    with pytest.raises(Interrupted):
        left()
    assert loop.history.run_dir is not None
    assert saved(loop.history.run_dir) == []
    names = [e.name for e in open_run(loop.history.run_dir).events(0) if e.kind == "instant"]
    assert names[-1] == "run_failed"


def test_a_loop_can_be_stopped_by_its_evaluations(config: dict[str, Any]) -> None:
    loop = kept(config)
    stopping, scores = EarlyStopping("score", patience=1), iter([3.0, 2.0, 2.5, 1.0])
    with pytest.raises(RuntimeError, match="inside `for step"):
        loop.stop("too early")
    for step in loop.steps():
        one(loop, step)
        value = next(scores)
        loop.evaluate(data(), lambda _, __, value=value: {"score": torch.tensor(value)})  # type: ignore[misc]
        if (reason := stopping.reason(loop.history)) is not None:
            loop.stop(reason)
    assert [metrics.step for metrics in loop.history.steps] == [1, 2, 3]
    assert loop.history.stopped.startswith("score did not improve on 2 (after step 2)")
    assert saved(loop.history.run_dir) == [3]


def test_a_loop_saves_between_steps_only(config: dict[str, Any]) -> None:
    """At the top of its body the data has moved on already, and a batch would be left out."""
    loop = kept(config)
    with pytest.raises(RuntimeError, match=r"call save\(\) after step"):
        for number, step in enumerate(loop.steps()):
            if number == 3:
                loop.save()
            one(loop, step)


class Average(Hook):
    """An EMA: it has a copy of the model, and finds it again."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_setup(self, trainer: Trainer) -> None:
        self.heard.append("setup")
        self.average = nn.Linear(4, 2)
        self.average.load_state_dict(trainer.model.state_dict())

    def on_fit_start(self, trainer: Trainer) -> None:
        self.heard.append("fit start")

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        for own, other in zip(self.average.parameters(), trainer.model.parameters(), strict=True):
            own.lerp_(other, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return self.average.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.heard.append("load")
        self.average.load_state_dict(state)


def test_a_hook_is_set_up_before_its_state_is_loaded(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Average()
    make(config, whole).fit(data(), data())
    first = make(config, Average(), StopAt(33))
    with pytest.raises(Interrupted):
        first.fit(data(), data())
    assert first.run_dir is not None
    go_on_in(first.run_dir, monkeypatch)
    resumed = Average()
    make(config, resumed).fit(data(), data())
    assert resumed.heard == ["setup", "load", "fit start"]
    assert torch.equal(resumed.average.weight, whole.average.weight)


class Late(Average):
    """As people wrote it: built where nothing can be loaded any more."""

    def on_setup(self, trainer: Trainer) -> None:
        """Forgotten."""

    def on_fit_start(self, trainer: Trainer) -> None:
        super().on_setup(trainer)


def test_a_hook_that_is_set_up_too_late_is_told_where(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(config, Late(), StopAt(33))
    with pytest.raises(Interrupted):
        first.fit(data(), data())
    assert first.run_dir is not None
    go_on_in(first.run_dir, monkeypatch)
    with pytest.raises(AttributeError) as raised:
        make(config, Late()).fit(data(), data())
    said = "create objects that have one in on_setup"
    assert any(said in note for note in raised.value.__notes__)


def test_a_run_that_decayed_everything_is_resumed_as_it_was() -> None:
    """Checkpoints of versions that had no other way do not say it."""
    now = Contract({"optimization.weight_decay": 0.1, "optimization.decay_norms_and_biases": False})
    with pytest.raises(ContractChanged, match=r"decay_norms_and_biases = false: was true"):
        now.compare("step-4", {"optimization.weight_decay": 0.1})
    as_before = Contract(
        {"optimization.decay_norms_and_biases": True, "scheduler.class": "built-in"}
    )
    assert as_before.compare("step-4", {"optimization.weight_decay": 0.1}) == []
    own = Contract({"scheduler.class": "StepLR"})
    with pytest.raises(ContractChanged, match=r"scheduler\.class = StepLR: was built-in"):
        own.compare("step-4", {"seed": 1})
