"""Evaluation: every sample once, and the single process's value to the last bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from drivetrain import ConfigError, PerSample
from drivetrain.testing import run_ranks
from drivetrain.train.evaluate import ExactMean
from drivetrain.train.history import EvaluationResult
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer
from tests.gpt_task import Sentences, collate, gpt_task
from tests.ranks.training import NUM_VAL, sentences, settings


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return (Sentences(NUM_VAL)[i] for i in range(NUM_VAL))


def evaluate_untrained(output_dir: str) -> list[EvaluationResult]:
    """One step with a vanishing learning rate: the same weights, to the bit, on any world."""
    results = []
    for strategy in ("ddp", "fsdp"):
        for data in (Sentences(NUM_VAL), Stream()):
            config = settings(
                output_dir,
                max_steps=1,
                optimization={"learning_rate": 1e-30},
                parallel={"strategy": strategy},
            )
            trainer = Trainer(gpt_task(), config)
            history = trainer.fit(sentences(), DataLoader(data, collate_fn=collate))
            results.append(history.evaluations[-1])
    return results


@pytest.mark.slow
@pytest.mark.long
def test_metrics_equal_the_single_process_exactly(tmp_path: Path) -> None:
    (alone, *others) = evaluate_untrained(str(tmp_path))
    assert alone.num_samples == NUM_VAL
    assert set(alone.metrics) == {"loss", "accuracy"}
    assert all(other == alone for other in others)
    for world_size in (2, 3, 4):
        for results in run_ranks(evaluate_untrained, world_size, 120, args=(str(tmp_path),)):
            assert results == [alone] * 4


def evaluate_with_batch_norm(output_dir: str) -> dict[str, float]:
    data = TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)))
    task = Task(
        model=lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        loss=lambda model, batch: model(batch[0]).square().mean(),
    )
    # 5 micro-batches on 3 ranks: the last rank has a turn without samples
    config = settings(output_dir, global_batch_size=20, micro_batch_size=4, max_steps=6)
    return dict(Trainer(task, config).fit(data, data).evaluations[-1].metrics)


def test_running_statistics_are_rank_0s_everywhere(tmp_path: Path) -> None:
    first, *others = run_ranks(evaluate_with_batch_norm, 3, 60, args=(str(tmp_path),))
    assert first["loss"] > 0
    assert all(other == first for other in others)


def test_the_sum_is_exact_whatever_the_order() -> None:
    forwards, backwards = ExactMean(), ExactMean()
    values = [1e16, 1.0, -1e16, 3.0]
    for value in values:
        forwards.add(value, 1)
    for value in reversed(values):
        backwards.add(value, 1)
    assert forwards.value() == backwards.value() == 1.0


def test_a_value_that_is_no_number_is_not_hidden() -> None:
    mean = ExactMean()
    mean.add(1.0, 1)
    mean.add(float("nan"), 1)
    assert mean.value() != mean.value()


SCORED = TensorDataset(
    torch.randn(37, 4, generator=torch.Generator().manual_seed(1)),
    (torch.arange(37) * 7 % 3 == 0).long(),
)


def short(output_dir: Path | str, **changes: Any) -> dict[str, Any]:
    """A step that leaves the weights as they are, and an evaluation."""
    still = {"learning_rate": 1e-30}
    return settings(str(output_dir), **{"max_steps": 1, "optimization": still, **changes})


def scores(model: nn.Module, batch: Any) -> dict[str, Any]:
    preds = model(batch[0]).sigmoid().flatten()
    return {
        "mean": preds.mean(),
        "preds": PerSample(preds),
        "target": PerSample(batch[1]),
        "text": PerSample([f"sample {value:.6f}" for value in preds.tolist()]),
    }


def ranking(outputs: dict[str, Any]) -> dict[str, float]:
    preds, target = outputs["preds"], outputs["target"]
    above = (preds[target == 1][:, None] > preds[target == 0][None, :]).double().mean()
    return {"auroc": float(above), "characters": float(sum(map(len, outputs["text"])))}


def no_means(output_dir: str) -> tuple[list[dict[str, float]], Any, dict[str, float]]:
    from torchmetrics import MetricCollection  # seconds, which other ranks need not spend
    from torchmetrics.classification import BinaryAUROC

    found = []
    judges: list[Any] = [ranking, MetricCollection({"auroc": BinaryAUROC(thresholds=None)})]
    for summarize in judges:
        task = Task(
            model=lambda: nn.Linear(4, 1),
            loss=lambda model, batch: model(batch[0]).square().mean(),
            metrics=scores,
            summarize=summarize,
        )
        config = short(output_dir, evaluation={"batch_size": 5})
        trainer = Trainer(task, config)
        found.append(dict(trainer.fit(SCORED, SCORED).evaluations[-1].metrics))
    said = trainer.predict(SCORED, lambda model, batch: {"x": batch[0], "y": model(batch[0])})
    again = trainer.evaluate({"all": SCORED, "few": TensorDataset(*SCORED[:9])})
    assert trainer.history.evaluations[-1] is again
    assert again.num_samples == 37 + 9
    rows = None if said is None else said["x"].tolist()
    return found, rows, dict(again.metrics)


def test_what_is_no_mean_is_computed_from_every_sample_in_order(tmp_path: Path) -> None:
    (by_hand, by_torchmetrics), said, again = no_means(str(tmp_path))
    assert by_torchmetrics["auroc"] == pytest.approx(by_hand["auroc"], abs=1e-6)
    assert 0.0 < by_hand["auroc"] < 1.0
    assert set(again) == {
        f"{name}/{metric}" for name in ("all", "few") for metric in ("mean", "auroc")
    }
    assert again["all/auroc"] == by_torchmetrics["auroc"]
    assert said == SCORED.tensors[0].tolist()
    answers = run_ranks(no_means, 3, 120, args=(str(tmp_path),))
    for found, _, others_again in answers:
        assert found == [by_hand, by_torchmetrics]
        assert others_again == again
    assert [other for _, other, _ in answers] == [said, None, None]


def test_only_the_first_samples_are_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return (SCORED[i % 37] for i in itertools.count())

    config = short(
        tmp_path,
        record={"progress": "plain", "sinks": []},
        evaluation={"max_samples": 11, "batch_size": 4},
    )
    task = Task(model=lambda: nn.Linear(4, 1), loss=lambda m, batch: m(batch[0]).square().mean())
    result = Trainer(task, config).fit(SCORED, {"map": SCORED, "stream": Endless()}).evaluations[-1]
    assert result.num_samples == 22
    assert result.metrics["map/loss"] == result.metrics["stream/loss"]
    assert "evaluated 11 of 37 of map" in capsys.readouterr().out


class Frozen(nn.Module):
    """A teacher that its author has put into eval mode, beside what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)).requires_grad_(False)
        self.teacher.eval()
        self.student = nn.Linear(4, 1)

    def forward(self, x: Any) -> Any:
        return self.student(self.teacher(x))


def test_parts_in_eval_mode_stay_so_through_training_and_evaluation(tmp_path: Path) -> None:
    task = Task(model=Frozen, loss=lambda model, batch: model(batch[0]).square().mean())
    config = short(tmp_path, max_steps=4, evaluation={"every_steps": 2})
    trainer = Trainer(task, config)
    trainer.fit(SCORED, SCORED)
    model: Any = trainer.model
    assert model.student.training
    assert not model.teacher.training
    assert not model.teacher[1].training
    assert torch.equal(model.teacher[0].running_mean, torch.zeros(4))


@pytest.mark.parametrize(
    ("metrics", "summarize", "sentence"),
    [
        (scores, None, "is a PerSample, but the task has no summarize; give Task a summarize"),
        (None, ranking, "metrics returns no PerSample; let Task.metrics return one"),
        (lambda m, b: {"x": PerSample(m(b[0])[:1])}, ranking, "has 1 values for 5 samples"),
        (lambda *_: {"x": PerSample("yes")}, ranking, "is neither a tensor nor a list"),
        (scores, lambda _: 3.0, "must return a dict of names and numbers"),
        (scores, lambda outputs: outputs, "summarize\\['preds'\\]"),
    ],
)
def test_what_cannot_be_summarized_is_said(
    tmp_path: Path, metrics: Any, summarize: Any, sentence: str
) -> None:
    task = Task(
        model=lambda: nn.Linear(4, 1),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        metrics=metrics,
        summarize=summarize,
    )
    config = short(tmp_path, evaluation={"batch_size": 5})
    with pytest.raises(ConfigError, match=sentence):
        Trainer(task, config).fit(SCORED, SCORED)


def test_the_trained_model_is_asked_after_fit_only() -> None:
    trainer = Trainer(gpt_task(), {"global_batch_size": 8, "max_steps": 1})
    with pytest.raises(RuntimeError, match="call fit\\(\\) first"):
        trainer.evaluate(SCORED)
