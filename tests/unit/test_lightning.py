"""`Task.from_lightning`: what Lightning's own Trainer does with a module, done here."""
# ruff: noqa: ARG005 - changed methods keep the names of those they stand for

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Subset, TensorDataset

from drivetrain import ConfigError, Hook, Task, Trainer
from drivetrain.train.lightning.optimizers import read_optimizers
from drivetrain.train.lightning.refusals import CALLED, OF_NO_CONCERN, REFUSED

L: Any = pytest.importorskip("lightning")
torchmetrics: Any = pytest.importorskip("torchmetrics")
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's, of loaders without workers

_DRAWN = torch.Generator().manual_seed(0)
_X = torch.randn(80, 8, generator=_DRAWN)
_ALL = TensorDataset(_X, (_X @ torch.randn(8, 4, generator=_DRAWN)).argmax(1))
TRAIN, VAL = Subset(_ALL, range(64)), Subset(_ALL, range(64, 80))
BATCH, EPOCHS = 16, 3


class Module(L.LightningModule):  # type: ignore[misc]
    """As people write them: metrics in objects and in numbers, a schedule that goes by one."""

    def __init__(self, shape: str = "plateau") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=4)
        self.both = torchmetrics.MetricCollection(
            [
                torchmetrics.F1Score(task="multiclass", num_classes=4, average="macro"),
                torchmetrics.AUROC(task="multiclass", num_classes=4),
            ],
            prefix="val_",
        )
        self.calls: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls.append(("training_step", batch_idx, self.current_epoch, self.global_step))
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.calls.append(("validation_step", batch_idx))
        out = self(batch[0])
        self.accuracy(out, batch[1])
        self.both.update(out.softmax(1), batch[1])
        self.log("val_loss", F.cross_entropy(out, batch[1]))
        self.log("val_accuracy", self.accuracy, on_epoch=True)
        self.log_dict(self.both)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        shape = self.hparams.shape
        if shape == "alone":
            return optimizer
        if shape == "lists":
            return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]
        if shape == "step":
            steps = self.trainer.estimated_stepping_batches
            schedule = OneCycleLR(optimizer, 0.1, total_steps=int(steps))
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }
        plateau = ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"}


_NOTED = (
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
)
for _name in _NOTED:
    setattr(Module, _name, lambda self, name=_name: self.calls.append(name))
Module.on_before_optimizer_step = lambda self, _: self.calls.append("on_before_optimizer_step")
Module.on_train_batch_start = lambda self, _, index: self.calls.append(("batch_start", index))
Module.on_train_batch_end = lambda self, _, __, index: self.calls.append(("batch_end", index))


class Data(L.LightningDataModule):  # type: ignore[misc]
    def setup(self, stage: str) -> None:
        self.stage = stage

    def train_dataloader(self) -> Any:
        return DataLoader(TRAIN, BATCH)

    def val_dataloader(self) -> Any:
        return DataLoader(VAL, 8)


def by_lightning(module: Any) -> dict[str, Any]:
    """What its own Trainer makes of it."""
    losses: list[float] = []
    rates: list[float] = []
    found: list[dict[str, float]] = []

    class Seen(L.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

        def on_train_batch_end(self, _: Any, __: Any, outputs: Any, *___: Any) -> None:
            losses.append(outputs["loss"].item())

        def on_validation_epoch_end(self, trainer: Any, _: Any) -> None:
            values = trainer.callback_metrics.items()
            found.append({name: float(value) for name, value in values if name[:3] == "val"})

    trainer = L.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=1,
        callbacks=[Seen()],
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, Data())
    return {"losses": losses, "rates": rates, "found": found}


@pytest.fixture
def config(quiet: dict[str, Any]) -> dict[str, Any]:
    return {
        "global_batch_size": BATCH,
        "num_train_epochs": EPOCHS,
        "evaluation": {"batch_size": 8},
        **quiet,
    }


def made(shape: str = "plateau") -> Any:
    torch.manual_seed(1)
    return Module(shape)


@pytest.mark.parametrize("shape", ["alone", "lists", "step", "plateau"])
def test_losses_rates_metrics_and_hooks_are_lightnings(shape: str, config: dict[str, Any]) -> None:
    theirs, ours = made(shape), made(shape)
    expected = by_lightning(theirs)
    history = Trainer(Task.from_lightning(ours, Data()), config).fit()
    assert history.losses == expected["losses"]
    assert [step.learning_rate for step in history.steps] == expected["rates"]
    for mine, other in zip(history.evaluations, expected["found"], strict=True):
        assert mine.metrics == pytest.approx(other, rel=1e-6)
    assert [step.parts["train_loss"] for step in history.steps] == history.losses
    assert ours.calls == theirs.calls
    for name, weight in theirs.state_dict().items():
        assert torch.equal(weight, ours.state_dict()[name]), name


def test_a_run_that_was_cut_off_ends_like_one_that_was_not(
    config: dict[str, Any], tmp_path: Path
) -> None:
    class Fails(Hook):
        def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
            if step == 7:
                raise KeyError("planted")

    def fit(name: str, hooks: list[Hook], **checkpoint: Any) -> Any:
        said = {**config, "name": name, "output_dir": str(tmp_path)}
        said["checkpoint"] = {"every_steps": 6, "asynchronous": False, **checkpoint}
        trainer = Trainer(Task.from_lightning(made("step"), Data()), said, hooks=hooks)
        return trainer.fit(), trainer.model

    whole, weights = fit("whole", [])
    with pytest.raises(KeyError):
        fit("cut", [Fails()])
    resumed, again = fit("resumed", [], resume_from=str(tmp_path / "cut"))
    assert resumed.losses == whole.losses[6:]
    assert torch.equal(again.net[0].weight, weights.net[0].weight)
    # batches are counted on from where the epoch was left
    assert again.calls[2][:2] == ("batch_start", 2)


def test_every_method_of_lightnings_is_called_refused_or_of_no_concern() -> None:
    """A hook that a new Lightning brings is not ignored in silence."""
    public = {
        name
        for kind in L.LightningModule.__mro__
        if kind.__module__.startswith("lightning.pytorch")
        for name, value in vars(kind).items()
        if callable(value) and not name.startswith("_") and isinstance(name, str)
    }
    other_loops = {name for name in public if "_test_" in name or "_predict_" in name}
    assert public - other_loops - CALLED - REFUSED.keys() - OF_NO_CONCERN == set()


def refused(change: dict[str, Any]) -> str:
    kind = type("Changed", (Module,), change)
    with pytest.raises(ConfigError) as caught:
        Task.from_lightning(kind())
    return str(caught.value)


def test_what_cannot_be_honoured_is_refused() -> None:
    assert refused({"optimizer_step": lambda self: None}) == (
        "Changed.optimizer_step: is not called here; write your own loop with drivetrain.prepare"
    )
    assert refused({"automatic_optimization": False}) == (
        "Changed.automatic_optimization = False: manual optimization steps optimizers from inside "
        "training_step; write your own loop: drivetrain.prepare takes several models"
    )
    assert "dataloader_idx" in refused(
        {"validation_step": lambda self, batch, batch_idx, dataloader_idx: None}
    )
    with pytest.raises(ConfigError, match="Linear: is not a LightningModule"):
        Task.from_lightning(nn.Linear(2, 2))


def test_a_learning_rate_beside_the_modules_optimizer_is_announced(quiet: dict[str, Any]) -> None:
    config = {"global_batch_size": BATCH, "max_steps": 1, **quiet}
    config["optimization"] = {"learning_rate": 0.1}
    trainer = Trainer(Task.from_lightning(lambda: Module("alone"), Data()), config)
    trainer.fit()
    assert trainer.assembly is not None
    warning = (
        "learning_rate = 0.1 has no effect: the script has its own optimizer (AdamW, lr = 0.02"
    )
    assert any(warning in note for note in trainer.assembly.notes)


def test_what_configure_optimizers_may_return() -> None:
    parameters = [nn.Parameter(torch.zeros(1))]
    sgd = torch.optim.SGD(parameters, lr=0.1)
    step = StepLR(sgd, 1)
    assert read_optimizers(sgd) == (sgd, None)
    assert read_optimizers([sgd]) == (sgd, None)
    for given in (
        ([sgd], [step]),
        {"optimizer": sgd, "lr_scheduler": step},
        [{"optimizer": sgd, "lr_scheduler": {"scheduler": step}}],
    ):
        _, schedule = read_optimizers(given)
        assert schedule is not None
        assert (schedule.scheduler, schedule.occasion) == (step, "epoch")
    for wrong, answer in (
        (None, "configure_optimizers = NoneType: is not an optimizer"),
        ([sgd, sgd], "returned 2 optimizers"),
        (([sgd], [step, step]), "returned 2 schedulers"),
        ({"optimizer": sgd, "lr_scheduler": ReduceLROnPlateau(sgd)}, "without a monitor"),
        ({"optimizer": sgd, "lr_scheduler": {"scheduler": step, "frequency": 2}}, "frequency 2"),
        ({"optimizer": sgd, "lr_scheduler": {"scheduler": step, "intervall": 2}}, "'intervall'"),
    ):
        with pytest.raises(ConfigError, match=answer):
            read_optimizers(wrong)


def test_misuse_in_a_step_is_answered(config: dict[str, Any]) -> None:
    def fit(**change: Any) -> None:
        Trainer(Task.from_lightning(type("Changed", (Module,), change)(), Data()), config).fit()

    def updates_twice(self: Any, batch: Any, batch_idx: int) -> None:
        for _ in range(2):
            self.accuracy(self(batch[0]), batch[1])
        self.log("val_loss", self.accuracy)

    with pytest.raises(ConfigError, match=r"self.log\('val_loss'\): .* 2 times in this step"):
        fit(validation_step=updates_twice)
    with pytest.raises(ConfigError, match="validation_step: logged nothing"):
        fit(validation_step=lambda self, batch: None)
    with pytest.raises(ConfigError, match=r"reduce_fx='max'"):
        fit(training_step=lambda self, batch: self.log("a", 1.0, reduce_fx="max"))
    with pytest.raises(AttributeError, match="self.trainer.strategy does not exist here"):
        fit(training_step=lambda self, batch: self.trainer.strategy)
    with pytest.raises(ConfigError, match="loss = None: is not a tensor"):
        fit(training_step=lambda self, batch: None)
    with pytest.raises(ConfigError, match="fit.*has no training data"):
        Trainer(Task.from_lightning(made()), config).fit()
