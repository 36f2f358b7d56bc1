"""What a task may get wrong is answered with one sentence and what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import ConfigError, Hook, Task, Total, Trainer
from drivetrain.testing import run_ranks
from drivetrain.train.keep_loop import prepare
from drivetrain.train.refusals import check_model, check_optimizer


def data() -> TensorDataset:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).long())


@pytest.fixture
def config(quiet: dict[str, Any]) -> dict[str, Any]:
    return {"global_batch_size": 8, "micro_batch_size": 4, "max_steps": 2, **quiet}


def mean(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def task(**changes: Any) -> Task:
    return replace(Task(model=lambda: nn.Linear(4, 2), loss=mean), **changes)


LOSSES: list[tuple[Any, str]] = [
    (lambda _, __: None, "loss = None: is not a tensor; return"),
    (lambda m, b: mean(m, b).item(), "loss = float: .*without .item"),
    (lambda m, b: {"loss": mean(m, b)}, r"loss = dict: .*\['loss'\]"),
    (
        lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"),
        r"loss = \(4,\): has 4 elements; .*Total",
    ),
    (lambda m, b: mean(m, b).to(torch.complex64), "loss = torch.complex64: "),
    (lambda m, b: mean(m, b).detach(), "loss: does not depend on"),
    (lambda _, __: torch.tensor(3.0), "loss: does not depend on"),
    (lambda m, b: Total(F.cross_entropy(m(b[0]), b[1], reduction="none"), 4), "has 4 elements"),
]


@pytest.mark.parametrize(("loss", "answer"), LOSSES)
def test_what_is_no_loss_is_answered(config: dict[str, Any], loss: Any, answer: str) -> None:
    with pytest.raises(ConfigError, match=answer):
        Trainer(task(loss=loss), config).fit(data())
    loop = prepare(lambda: nn.Linear(4, 2), None, data(), config)
    with pytest.raises(ConfigError, match=answer):
        for step in loop.steps():
            for batch in step:
                loop.backward(loss(loop.model, batch))


def test_a_loss_of_one_element_may_have_a_dimension(config: dict[str, Any]) -> None:
    trainer = Trainer(task(loss=lambda m, b: mean(m, b).reshape(1)), config)
    assert len(trainer.fit(data()).losses) == 2


def test_an_optimizer_that_needs_a_closure_is_refused(config: dict[str, Any]) -> None:
    def lbfgs(parameters: Any, _: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters)

    with pytest.raises(ConfigError, match=r"optimizer = LBFGS: .*closure"):
        Trainer(task(optimizer=lbfgs), config).fit(data())
    check_optimizer(torch.optim.AdamW([nn.Parameter(torch.zeros(1))]))


def test_sparse_gradients_are_refused(config: dict[str, Any]) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 2, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.table(x.abs().long().clamp(max=9)).mean(1)
            return found

    with pytest.raises(ConfigError, match=r"model = table: .*sparse=False"):
        Trainer(task(model=Sparse), config).fit(data())


def test_complex_parameters_are_refused_on_several_ranks() -> None:
    model = nn.Module()
    model.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"model = phase: .*view_as_complex"):
        check_model(model, num_ranks=2)
    check_model(model, num_ranks=1)


@pytest.mark.parametrize(
    ("metrics", "answer"),
    [
        (mean, "metrics = Tensor: is not a dict"),
        (
            lambda m, b: {"acc": m(b[0]).argmax(1)},
            r"metrics.*acc.* = \(4,\): is not a single number",
        ),
        (lambda _, __: {"acc": None}, r"metrics\['acc'\] = None: is not a single number"),
    ],
)
def test_what_is_no_metric_is_answered(config: dict[str, Any], metrics: Any, answer: str) -> None:
    with pytest.raises(ConfigError, match=answer):
        Trainer(task(metrics=metrics), config).fit(data(), data())


def nothing(model: nn.Module, batch: Any) -> Total:
    return Total(model(batch[0]).sum() * 0.0, 0)


def test_a_run_in_which_nothing_counts_does_not_succeed(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config["record"] = {**config["record"], "progress": "plain", "logging_steps": 1}
    with pytest.raises(ConfigError, match=r"all 2 steps .*counted no tokens.*ignore index"):
        Trainer(task(loss=nothing), config).fit(data())
    assert "warning: step 1 counted no tokens" in "".join(capsys.readouterr())
    with pytest.raises(ConfigError, match="the last 20 steps, up to 20,"):
        Trainer(task(loss=nothing), {**config, "max_steps": 50}).fit(data())


def test_a_step_without_a_token_now_and_then_is_only_said(config: dict[str, Any]) -> None:
    calls = iter(range(100))

    def at_times(model: nn.Module, batch: Any) -> Total:
        loss = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        return nothing(model, batch) if next(calls) < 4 else Total(loss, 4)

    config["record"] = {**config["record"], "logging_steps": 1}
    history = Trainer(task(loss=at_times), {**config, "max_steps": 4}).fit(data())
    assert history.losses[:2] == [0.0, 0.0]
    assert history.losses[3] > 0


def test_a_model_in_the_place_of_its_function_is_answered() -> None:
    with pytest.raises(
        ConfigError, match="Task.model = Linear: is a model, but must be a function"
    ):
        task(model=nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        (
            {"model": None},
            "Task.model = NoneType: is not a function; pass one that builds the model",
        ),
        ({"loss": None}, "Task.loss = NoneType: is not a function"),
        ({"loss": nn.CrossEntropyLoss()}, r"Task.loss = CrossEntropyLoss: .*criterion\(model"),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)},
            "Task.optimizer = SGD: is not a function; pass one that builds it",
        ),
        ({"schedule": 3}, "Task.schedule = int: is not a function"),
        ({"model": lambda: None}, "model = None: is not a torch.nn.Module; return the model"),
        (
            {"loss": lambda m, b: SimpleNamespace(loss=mean(m, b))},
            "loss = SimpleNamespace: is not a tensor; return its loss",
        ),
    ],
)
def test_what_is_no_part_of_a_task_is_answered(
    config: dict[str, Any], changes: dict[str, Any], answer: str
) -> None:
    with pytest.raises(ConfigError, match=answer):
        Trainer(task(**changes), config).fit(data())


def test_what_is_no_task_and_no_hook_is_answered(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Trainer = Linear: needs a Task first"):
        Trainer(nn.Linear(4, 2), config)  # type: ignore[arg-type]
    for hooks in ([Hook], Hook()):
        with pytest.raises(ConfigError, match="Trainer.hooks = Hook: must be a list of"):
            Trainer(task(), config, hooks=hooks)  # type: ignore[arg-type]


@pytest.mark.parametrize("several", [{"a": data(), "b": data()}, {0: data()}, [data()], {"a": 1}])
def test_several_sets_where_one_belongs_are_answered(config: dict[str, Any], several: Any) -> None:
    with pytest.raises(ConfigError, match="data = .*: contains several datasets.*ConcatDataset"):
        Trainer(task(), config).fit(several)


def test_several_validation_sets_have_names(config: dict[str, Any]) -> None:
    found = Trainer(task(), config).fit(data(), {"a": data(), "b": data()}).evaluations[-1]
    assert {"a/loss", "b/loss"} <= found.metrics.keys()
    with pytest.raises(ConfigError, match="val = list: contains several datasets"):
        Trainer(task(), config).fit(data(), [data(), data()])


def test_samples_may_lie_in_a_list_or_under_numbers(config: dict[str, Any]) -> None:
    samples = [data()[index] for index in range(16)]
    listed = Trainer(task(), config).fit(samples)
    numbered = Trainer(task(), config).fit(dict(enumerate(samples)))
    assert listed.losses == numbered.losses


def test_an_argument_of_prepare_out_of_its_place_is_answered(config: dict[str, Any]) -> None:
    model: Any = nn.Linear(4, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader: Any = DataLoader(data())
    order = (
        r"; call prepare\(model, optimizer, train, config, stateful=…, scheduler=…\); validation"
    )
    for given, answer in (
        ((model, optimizer, loader, loader, scheduler), "config = DataLoader: is not a config"),
        ((model, optimizer, loader, loader, scheduler), "stateful = StepLR: is not a dict of .*"),
        ((model, optimizer, loader, "run.yaml"), "config = str: is not a config"),
        ((model, optimizer, loader, config, scheduler), "stateful = StepLR: is not a dict of .*"),
        ((model, loader, optimizer, config), "optimizer = DataLoader: is not a torch optimizer"),
        ((optimizer, model, loader, config), "optimizer = Linear: is not a torch optimizer"),
        ((optimizer, None, loader, config), "model = SGD: is not a model"),
        ((model, optimizer, scheduler, config), "train = StepLR: is not data"),
    ):
        with pytest.raises(ConfigError, match=answer + order):
            prepare(*given)


def test_a_loop_says_where_it_is(config: dict[str, Any]) -> None:
    loop = prepare(lambda: nn.Linear(4, 2), None, data(), {**config, "max_steps": 3})
    assert loop.total_steps == 3
    seen = []
    for step in loop.steps():
        for batch in step:
            loop.backward(mean(loop.model, batch))
        seen.append((loop.step_number, loop.epoch))
        loop.step()
    assert seen == [(0, 0), (1, 0), (2, 1)]
    assert loop.step_number == 3


class Scheduled:
    """A scheduler's methods."""

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize("where", ["optimizer", "train", "scheduler"])
def test_what_accelerate_has_prepared_is_refused(config: dict[str, Any], where: str) -> None:
    """Its scheduler steps once per process: the learning rate would depend on their number."""
    model, train = nn.Linear(4, 2), data()
    given: dict[str, Any] = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "train": DataLoader(train),
        "scheduler": None,
    }
    wrapped = type("Wrapped", (type(given[where]) if given[where] else Scheduled,), {})
    wrapped.__module__ = "accelerate.of_a_test"
    if where == "scheduler":
        given[where] = wrapped()
    else:
        given[where].__class__ = wrapped
    said = f"{where} = Wrapped: comes from accelerator.prepare"
    with pytest.raises(ConfigError, match=said):
        prepare(model, given["optimizer"], given["train"], config, scheduler=given["scheduler"])


def test_a_schedule_that_accelerate_has_prepared_is_refused(config: dict[str, Any]) -> None:
    kind = type("AcceleratedScheduler", (Scheduled,), {"__module__": "accelerate.scheduler"})
    of_one = task(schedule=lambda _, __: kind())
    with pytest.raises(ConfigError, match="schedule = AcceleratedScheduler: comes from"):
        Trainer(of_one, config).fit(data())


@pytest.mark.parametrize("inside", [False, True])
def test_a_model_that_is_distributed_already_is_refused(
    config: dict[str, Any], *, inside: bool
) -> None:
    def made() -> nn.Module:
        wrapped = nn.DataParallel(nn.Linear(4, 2))
        return nn.Sequential(wrapped) if inside else wrapped

    where = r"model\.0" if inside else "model"
    with pytest.raises(ConfigError, match=f"^{where} = DataParallel: is distributed already"):
        Trainer(task(model=made), config).fit(data())


def distributed_twice(kind: str, folder: str) -> str:
    """What is said of a model in DistributedDataParallel or under fully_shard."""
    model: nn.Module = nn.Linear(4, 2)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        torch.distributed.fsdp.fully_shard(model)
    settings = {"global_batch_size": 8, "max_steps": 2, "output_dir": folder}
    with pytest.raises(ConfigError) as raised:
        prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data(), settings)
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "said"), [("ddp", "DistributedDataParallel"), ("fsdp", "FSDPLinear")]
)
def test_on_ranks_too(tmp_path: Path, kind: str, said: str) -> None:
    for answer in run_ranks(distributed_twice, 2, 120, args=(kind, str(tmp_path))):
        assert answer.startswith(f"model = {said}: is distributed already")


@pytest.mark.parametrize("count", [lambda right: right.sum(), lambda right: right.sum().item()])
def test_a_count_is_not_taken_for_a_mean(config: dict[str, Any], count: Any) -> None:
    def metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"accuracy": count(model(batch[0]).argmax(1) == batch[1])}

    said = (
        r"metrics\['accuracy'\] = .*: is a whole number, .* return Total\(accuracy, len\(batch\)\)"
    )
    with pytest.raises(ConfigError, match=said):
        Trainer(task(metrics=metrics), config).fit(data(), data())
