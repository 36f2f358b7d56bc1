"""The learning rate: the config's curves, a scheduler of the user's own, and nobody's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn
from torch.optim import lr_scheduler as torch_schedulers
from torch.utils.data import TensorDataset

from drivetrain import ConfigError, Hook, LRSchedule, Task, Trainer, prepare
from drivetrain.config.load import resolve
from drivetrain.config.schema import Optimization
from drivetrain.train.history import History
from drivetrain.train.optimization.schedule import CurveRate, RateCurve
from drivetrain.train.several.optimizers import as_one, kind_of
from tests.ranks.resuming import Interrupted, go_on_in

STEPS = 12


def data() -> TensorDataset:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).long())


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def sgd(parameters: Iterable[nn.Parameter], _: Optimization) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def make_task(**more: Any) -> Task:
    return Task(model=lambda: nn.Linear(4, 2), loss=loss, optimizer=sgd, **more)


@pytest.fixture
def config(quiet: dict[str, Any]) -> dict[str, Any]:
    saving = {"every_steps": 2, "asynchronous": False}
    return {"global_batch_size": 8, "max_steps": STEPS, "checkpoint": saving, **quiet}


class StopAfter(Hook):
    """Ends an attempt in the step after this many."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_start(self, trainer: Trainer, step: int) -> None:
        if trainer.history.resumed_step == 0 and step == self.steps + 1:
            raise Interrupted


def rates(history: History) -> list[float]:
    return [metrics.learning_rate for metrics in history.steps]


def interrupted(
    make: Callable[[list[Hook]], Trainer], after: int, monkeypatch: pytest.MonkeyPatch, val: Any
) -> list[float]:
    """The rates of the steps that a second attempt takes, and the losses."""
    first = make([StopAfter(after)])
    with pytest.raises(Interrupted):
        first.fit(data(), val)
    assert first.run_dir is not None
    go_on_in(first.run_dir, monkeypatch)
    history = make([]).fit(data(), val)
    assert history.resumed_step > 0
    return rates(history)


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        (RateCurve("wsd", 2, 10, 0.0, decay_steps=4), [0.5, *[1.0] * 5, 0.75, 0.5, 0.25, 0.0]),
        (RateCurve("wsd", 0, 20, 0.5), [*[1.0] * 18, 0.75, 0.5]),
        (RateCurve("linear", 0, 20, 0.0, warmup_ratio=0.1, decay_steps=2), [0.5, 1, 1, 0.5, 0, 0]),
        (RateCurve("cosine", 1, None, 0.0, decay_steps=2), [1, 1, 0.5, 0.0, 0.0]),
        (RateCurve("inverse_sqrt", 4, None, 0.0), [0.25, 0.5, 0.75, 1, math.sqrt(4 / 5)]),
        (RateCurve("constant", 0, 10, 0.0, warmup_ratio=0.15), [0.5, 1.0, 1.0]),
    ],
)
def test_curves(curve: RateCurve, expected: list[float]) -> None:
    assert [curve.factor(s) for s in range(len(expected))] == pytest.approx(expected, abs=1e-12)


def test_what_a_curve_cannot_be() -> None:
    both = {"warmup_steps": 2, "warmup_ratio": 0.1}
    for optimization, said in (
        (both, r"warmup_ratio = 0\.1: warmup_steps = 2 is set as well"),
        ({"decay_steps": 5}, "decay_steps = 5: lr_scheduler_type = constant has no decay phase"),
        ({"lr_scheduler_type": "wsd", "decay_steps": 11}, "decay_steps = 11: only 10 of the run's"),
        ({"lr_scheduler_type": "none", "warmup_steps": 1}, "none never changes the rate"),
    ):
        with pytest.raises(ConfigError, match=said):
            resolve({"global_batch_size": 8, "max_steps": 10, "optimization": optimization})


SCHEDULERS: dict[str, Callable[[Any, Any], Any]] = {
    "OneCycleLR": lambda o, n: torch_schedulers.OneCycleLR(o, max_lr=0.1, total_steps=n),
    "LambdaLR": lambda o, n: torch_schedulers.LambdaLR(o, lambda step: 1 - step / (n + 1)),
    "MultiplicativeLR": lambda o, _: torch_schedulers.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o, _: torch_schedulers.StepLR(o, 3),
    "MultiStepLR": lambda o, _: torch_schedulers.MultiStepLR(o, [2, 7]),
    "ExponentialLR": lambda o, _: torch_schedulers.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o, n: torch_schedulers.PolynomialLR(o, n, power=2.0),
    "CosineAnnealingLR": lambda o, n: torch_schedulers.CosineAnnealingLR(o, n, eta_min=1e-3),
    "WarmRestarts": lambda o, _: torch_schedulers.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o, _: torch_schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "SequentialLR": lambda o, _: torch_schedulers.SequentialLR(
        o,
        [torch_schedulers.LinearLR(o, 0.1, total_iters=4), torch_schedulers.MultiStepLR(o, [1, 4])],
        milestones=[4],
    ),
    "ChainedScheduler": lambda o, _: torch_schedulers.ChainedScheduler(
        [torch_schedulers.ConstantLR(o, 0.5, 4), torch_schedulers.ExponentialLR(o, 0.9)], o
    ),
    "each epoch": lambda o, _: LRSchedule(torch_schedulers.StepLR(o, 1), every="epoch"),
    "ReduceLROnPlateau": lambda o, _: torch_schedulers.ReduceLROnPlateau(
        o, mode="max", patience=0, factor=0.5
    ),
    "each evaluation": lambda o, _: LRSchedule(
        torch_schedulers.ExponentialLR(o, 0.5), every="evaluation"
    ),
}


def by_hand(make: Callable[[Any, Any], Any], evaluations: list[float]) -> list[float]:
    """What a plain loop would have: eight steps an epoch, an evaluation each three steps."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    made = make(optimizer, STEPS)
    schedule = made if isinstance(made, LRSchedule) else LRSchedule(made)
    found, losses = [], iter(evaluations)
    for step in range(1, STEPS + 1):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        due = {"step": True, "epoch": step % 8 == 0, "evaluation": step % 3 == 0}
        if not due[schedule.occasion]:
            continue
        if isinstance(schedule.scheduler, torch_schedulers.ReduceLROnPlateau):
            schedule.scheduler.step(next(losses))
        else:
            schedule.scheduler.step()
    return found


@pytest.mark.parametrize("name", SCHEDULERS)
def test_any_torch_scheduler_sets_what_it_sets_in_a_plain_loop_and_resumes(
    name: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**config, "evaluation": {"every_steps": 3}}

    def make(hooks: list[Hook]) -> Trainer:
        return Trainer(make_task(schedule=SCHEDULERS[name]), config, hooks)

    whole = make([])
    history = whole.fit(data(), data())
    expected = by_hand(SCHEDULERS[name], [r.metrics["loss"] for r in history.evaluations])
    assert rates(history) == expected
    assert len(set(expected)) > 1, "a schedule that does nothing shows nothing"
    resumed = interrupted(make, 7, monkeypatch, data())
    assert resumed == expected[6:], "to the last bit"


def test_run_yaml_says_whose_schedule_it_is(config: dict[str, Any]) -> None:
    trainer = Trainer(make_task(schedule=SCHEDULERS["StepLR"]), config)
    trainer.fit(data())
    assert trainer.run_dir is not None
    said = yaml.safe_load((trainer.run_dir / "run.yaml").read_text())
    assert said["config"]["optimization"]["lr_scheduler_type"] == "none"
    assert "the script has its own schedule" in said["sources"]["optimization.lr_scheduler_type"]


def keep_loop(
    config: dict[str, Any], stop_after: int = STEPS, val: bool = False, **kwargs: Any
) -> tuple[list[float], Path]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    make = kwargs.pop("make")
    steps_it = kwargs.pop("steps_it", False)
    made = make(optimizer, STEPS)
    loop = prepare(model, optimizer, data(), config, scheduler=made)
    for number, step in enumerate(loop.steps(), 1):
        if number > stop_after:
            raise Interrupted
        for batch in step:
            loop.backward(loss(loop.model, batch))
        loop.step()
        if steps_it:
            (made.scheduler if isinstance(made, LRSchedule) else made).step()
        if val:
            loop.evaluate(data(), lambda model, batch: {"loss": loss(model, batch)})
    assert loop.history.run_dir is not None
    return rates(loop.history), loop.history.run_dir


def own_steps(optimizer: Any, total: Any) -> LRSchedule:
    return LRSchedule(SCHEDULERS["OneCycleLR"](optimizer, total), every="never")


@pytest.mark.parametrize(
    ("make", "steps_it"),
    [(SCHEDULERS["OneCycleLR"], False), (SCHEDULERS["SequentialLR"], False), (own_steps, True)],
)
def test_a_scheduler_built_on_a_given_optimizer_is_stepped_saved_and_resumed(
    make: Any, steps_it: bool, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = by_hand(lambda o, n: _stepped_each_step(make(o, n)), [])
    assert keep_loop(config, make=make, steps_it=steps_it)[0] == expected
    config = {**config, "name": "cut"}
    with pytest.raises(Interrupted):
        keep_loop(config, stop_after=7, make=make, steps_it=steps_it)
    go_on_in(Path(config["output_dir"]) / "cut", monkeypatch)
    assert keep_loop(config, make=make, steps_it=steps_it)[0] == expected[6:]


def _stepped_each_step(made: Any) -> LRSchedule:
    return LRSchedule(made.scheduler if isinstance(made, LRSchedule) else made, every="step")


def test_a_plateau_goes_by_the_evaluations_of_a_loop_of_ones_own(config: dict[str, Any]) -> None:
    found, _ = keep_loop(config, make=SCHEDULERS["ReduceLROnPlateau"], val=True)
    assert found[:4] == [0.1, 0.1, 0.05, 0.025], "mode=max takes a falling loss for getting worse"


def test_a_function_makes_the_scheduler_where_prepare_makes_the_optimizer(
    config: dict[str, Any],
) -> None:
    loop = prepare(
        lambda: nn.Linear(4, 2), None, data(), config, scheduler=SCHEDULERS["ExponentialLR"]
    )
    for step in loop.steps():
        for batch in step:
            loop.backward(loss(loop.model, batch))
        loop.step()
    assert rates(loop.history)[:2] == [1e-3, pytest.approx(8e-4)]


def test_a_scheduler_that_is_stepped_twice_is_refused(config: dict[str, Any]) -> None:
    said = r'schedule = StepLR: is stepped by both the script and .*every="never"'
    with pytest.raises(ConfigError, match=said):
        keep_loop(config, make=SCHEDULERS["StepLR"], steps_it=True)


def test_what_is_no_schedule_is_refused(config: dict[str, Any]) -> None:
    def refused(said: str, schedule: Any, **changes: Any) -> None:
        with pytest.raises(ConfigError, match=said):
            Trainer(make_task(schedule=schedule), {**config, **changes}).fit(data(), data())

    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    step = torch_schedulers.StepLR
    refused("schedule = float: is not a scheduler", lambda _, __: 0.1)
    refused("schedule = StepLR: was built on another", lambda _, __: step(other, 2))
    plateau = torch_schedulers.ReduceLROnPlateau
    refused("needs a metric, but a step has none", lambda o, _: LRSchedule(plateau(o), "step"))
    refused(
        "LRSchedule.metric = acc: is not a metric of this evaluation; use one of loss",
        lambda o, _: LRSchedule(plateau(o), metric="acc"),
    )
    refused(
        "lr_scheduler_type = cosine: .*the script has its own schedule",
        SCHEDULERS["StepLR"],
        optimization={"lr_scheduler_type": "cosine"},
    )
    with pytest.raises(ConfigError, match="ReduceLROnPlateau: is stepped at evaluations, but fit"):
        Trainer(make_task(schedule=lambda o, _: plateau(o)), config).fit(data())


def test_another_schedule_is_another_training(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it hides in a function; once accepted, it is where it would have been."""

    def fit(total: int, hooks: list[Hook]) -> History:
        schedule: Any = lambda o, _: SCHEDULERS["LambdaLR"](o, total)  # noqa: E731
        return Trainer(make_task(schedule=schedule), {**config, "name": "a"}, hooks).fit(data())

    with pytest.raises(Interrupted):
        fit(STEPS, [StopAfter(7)])
    go_on_in(Path(config["output_dir"]) / "a", monkeypatch)
    with pytest.raises(ConfigError, match=r"scheduler\.lr_lambdas.*--accept-change"):
        fit(2 * STEPS, [])
    monkeypatch.setattr("drivetrain.record.session._opened", 0)
    monkeypatch.setenv("DRIVETRAIN_ACCEPT_CHANGE", "scheduler.lr_lambdas")
    assert rates(fit(2 * STEPS, []))[0] == 0.1 * (1 - 6 / (2 * STEPS + 1))


class OwnRates(Hook):
    """Sets the rate itself, and keeps nothing: what it sets is in the checkpoint."""

    def on_before_optimizer_step(self, trainer: Trainer, step: int) -> None:
        assert trainer.assembly is not None
        if step in (1, 5):
            trainer.assembly.engine.optimizer.param_groups[0]["lr"] = 0.5 if step == 1 else 0.25


@pytest.mark.parametrize("shape", ["none", "constant"])
def test_a_rate_that_a_script_sets_is_left_as_it_is(
    shape: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first step of an attempt, too: it was set to the config's there."""
    config = {**config, "optimization": {"lr_scheduler_type": shape}}

    def make(hooks: list[Hook]) -> Trainer:
        return Trainer(make_task(), config, [*hooks, OwnRates()])

    assert rates(make([]).fit(data())) == [0.5] * 4 + [0.25] * 8
    assert interrupted(make, 7, monkeypatch, None) == [0.25] * 6


def test_two_who_set_one_rate_are_refused(config: dict[str, Any]) -> None:
    config = {**config, "optimization": {"lr_scheduler_type": "cosine"}}
    said = r"lr_scheduler_type = cosine: the script has set lr = 0\.25 .*use none"
    with pytest.raises(ConfigError, match=said):
        Trainer(make_task(), config, [SetsLate()]).fit(data())


class SetsLate(Hook):
    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        assert trainer.assembly is not None
        trainer.assembly.engine.optimizer.param_groups[0]["lr"] = 0.25


def under_none(config: dict[str, Any], stop_after: int = STEPS) -> list[float]:
    config = {**config, "name": "own", "optimization": {"lr_scheduler_type": "none"}}
    loop = prepare(lambda: nn.Linear(4, 2), None, data(), config)
    scheduler = torch_schedulers.StepLR(loop.optimizer, 1, 0.5)
    for number, step in enumerate(loop.steps(), 1):
        if number > stop_after:
            raise Interrupted
        for batch in step:
            loop.backward(loss(loop.model, batch))
        loop.step()
        scheduler.step()
    return rates(loop.history)


def test_none_leaves_a_torch_scheduler_to_the_script(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for one that nobody has saved: it would begin anew."""
    with pytest.raises(Interrupted):
        under_none(config, stop_after=7)
    go_on_in(Path(config["output_dir"]) / "own", monkeypatch)
    with pytest.raises(ConfigError, match="but not saved, and would start over; pass it on"):
        under_none(config)
    monkeypatch.delenv("DRIVETRAIN_RUN_DIR")
    assert under_none(config)[:3] == [1e-3, 5e-4, 2.5e-4]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.body(x)))
        return out


def groups_of(task: Task, config: dict[str, Any], **optimization: Any) -> list[dict[str, Any]]:
    trainer = Trainer(task, {**config, "optimization": optimization})
    trainer.fit(data())
    assert trainer.assembly is not None
    groups = trainer.assembly.engine.optimizer.param_groups
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    return [{**group, "params": [names[id(p)] for p in group["params"]]} for group in groups]


def test_norms_and_biases_do_not_decay(config: dict[str, Any]) -> None:
    task = Task(model=Normed, loss=loss)
    matrices, apart = groups_of(task, config, weight_decay=0.1)
    assert matrices["params"] == ["body.weight", "head.weight"]
    assert apart["params"] == ["body.bias", "norm.weight", "norm.bias", "head.bias"]
    assert [matrices["weight_decay"], apart["weight_decay"]] == [0.1, 0.0]
    assert len(groups_of(task, config, weight_decay=0.1, decay_norms_and_biases=True)) == 1
    assert len(groups_of(task, config)) == 1, "and nothing changes where nothing decays"


def by_model(model: nn.Module) -> torch.optim.Optimizer:
    assert isinstance(model, Normed)
    return torch.optim.AdamW([{"params": model.head.parameters(), "lr": 0.5}], lr=0.1)


def by_name(named_parameters: Any, optimization: Optimization) -> torch.optim.Optimizer:
    heads = [p for name, p in named_parameters if name.startswith("head")]
    return torch.optim.AdamW([{"params": heads, "lr": 500 * optimization.learning_rate}])


@pytest.mark.parametrize("make", [by_model, by_name])
def test_an_optimizer_can_be_made_from_names_or_the_model(
    make: Any, config: dict[str, Any]
) -> None:
    (group,) = groups_of(Task(model=Normed, loss=loss, optimizer=make), config)
    assert (group["params"], group["lr"]) == (["head.weight", "head.bias"], 0.5)


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        partial(torch.optim.SGD, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda p, o=None: torch.optim.SGD(p, lr=o.learning_rate),
        lambda *given: torch.optim.SGD(given[0], lr=given[1].learning_rate),
    ],
)
def test_an_optimizer_takes_what_it_has_arguments_for(make: Any, config: dict[str, Any]) -> None:
    (group,) = groups_of(Task(model=Normed, loss=loss, optimizer=make), config)
    assert len(group["params"]) == 6


def test_scaling_is_done_once(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = {"learning_rate_scaling": "linear", "base_batch_size": 4}
    config = {**config, "optimization": scaled}

    def make(hooks: list[Hook]) -> Trainer:
        return Trainer(make_task(), config, hooks)

    assert rates(make([]).fit(data())) == [0.2] * STEPS
    assert interrupted(make, 7, monkeypatch, None) == [0.2] * 6


def test_a_curve_is_set_anew_after_other_rates_were_loaded() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    rate = CurveRate(optimizer, RateCurve("wsd", 0, 10, 0.0, decay_steps=2))
    rate.before_step(0)
    optimizer.param_groups[0]["lr"] = 0.5
    rate.load_state_dict({})
    rate.before_step(1)
    assert rate.current == 1.0


def test_a_task_is_told_how_long_the_run_is(config: dict[str, Any]) -> None:
    told: list[int | None] = []

    def schedule(optimizer: Any, total_steps: int | None) -> Any:
        told.append(total_steps)
        return torch_schedulers.StepLR(optimizer, 1)

    config = {**config, "max_steps": None, "num_train_epochs": 2}
    Trainer(replace(make_task(), schedule=schedule), config).fit(data())
    assert told == [16]


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x).relu())
        return out


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """As people write it."""
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and n.startswith("body")]
    rest = [p for n, p in model.named_parameters() if not (p.ndim == 2 and n.startswith("body"))]
    return [torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=3e-3)]


def test_several_optimizers_are_stepped_scheduled_and_saved_as_one(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(hooks: list[Hook]) -> Trainer:
        schedule = SCHEDULERS["ExponentialLR"]
        task = Task(model=Deep, loss=loss, optimizer=muon_and_adamw, schedule=schedule)
        return Trainer(task, config, hooks)

    whole = make([])
    history = whole.fit(data())
    assert rates(history) == pytest.approx([0.02 * 0.8**n for n in range(STEPS)])
    first = make([StopAfter(7)])
    with pytest.raises(Interrupted):
        first.fit(data())
    assert first.run_dir is not None
    go_on_in(first.run_dir, monkeypatch)
    resumed = make([])
    assert resumed.fit(data()).losses == history.losses[6:], "to the last bit"
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert resumed.assembly is not None
    assert resumed.assembly.made["optimizer.class"] == "Muon + AdamW"


def test_several_optimizers_train_what_they_train_in_a_plain_loop(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, plain = Deep(), Deep()
    plain.load_state_dict(model.state_dict())
    optimizers = muon_and_adamw(plain)
    loop = prepare(model, muon_and_adamw(model), data(), config)
    for step in loop.steps():
        for batch in step:
            loop.backward(loss(loop.model, batch))
            loss(plain, batch).backward()
        loop.step()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5)


def test_a_dict_of_optimizers_is_a_list_of_them() -> None:
    listed = as_one(muon_and_adamw(Deep()))
    named = as_one(dict(zip(("hidden", "rest"), muon_and_adamw(Deep()), strict=True)))
    assert kind_of(named) == kind_of(listed) == "Muon + AdamW"
    assert len(named.param_groups) == len(listed.param_groups) == 2


def test_what_is_no_optimizer_is_refused(config: dict[str, Any]) -> None:
    def both(parameters: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(parameters, lr=0.1), torch.optim.SGD(parameters, lr=0.1)]

    def scheduled(parameters: Any) -> list[torch.optim.Optimizer]:
        first, second = (torch.optim.SGD(part, lr=0.1) for part in (parameters[:1], parameters[1:]))
        torch_schedulers.StepLR(second, 1)
        return [first, second]

    refused: tuple[tuple[Any, str], ...] = (
        (lambda _: None, "optimizer = NoneType: is not a torch optimizer"),
        (lambda _: [], "optimizer: is an empty list"),
        (lambda _: {"body": None}, "optimizer = NoneType: is not a torch optimizer"),
        (both, r"optimizer = SGD \+ SGD: some parameters appear in more than one"),
        (scheduled, r"optimizer = SGD \+ SGD: a torch LR scheduler was built on it"),
    )
    for make, said in refused:
        with pytest.raises(ConfigError, match=said):
            Trainer(Task(model=Deep, loss=loss, optimizer=make), config).fit(data())
