"""Hooks: callbacks at fixed points of the training loop, named as in Lightning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import blame

if TYPE_CHECKING:
    from drivetrain.train.history import EvaluationResult, StepMetrics
    from drivetrain.train.trainer import Trainer


class Hook:
    """Base class of hooks: override the methods you need. They run on every rank.

    Every method gets the trainer first. Steps count from 1, as in History, logs and checkpoints;
    `step` is the step in progress, or the one just completed. A hook with `state_dict` and
    `load_state_dict` is saved and restored with the run.
    """

    def on_setup(self, trainer: Trainer) -> None:
        """Called when model, optimizer and data exist, before a checkpoint is loaded.

        Create objects with their own state here, such as an EMA of the model.
        """

    def on_fit_start(self, trainer: Trainer) -> None:
        """Called before the first step, after the state of a resumed run has been restored."""

    def on_train_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        """Called before the first step of an epoch."""

    def on_train_batch_start(self, trainer: Trainer, step: int) -> None:
        """Called before a step."""

    def on_before_optimizer_step(self, trainer: Trainer, step: int) -> None:
        """Called when the step's gradients are complete and clipped."""

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        """Called after a step."""

    def on_log(self, trainer: Trainer, metrics: Sequence[StepMetrics]) -> None:
        """Called with the metrics of the steps since the last log, reduced over all ranks."""

    def on_train_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        """Called after the last step of an epoch."""

    def on_validation_start(self, trainer: Trainer, step: int) -> None:
        """Called before an evaluation."""

    def on_validation_end(self, trainer: Trainer, result: EvaluationResult) -> None:
        """Called after an evaluation, with its result."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Called when an error ends the training; the error is re-raised afterwards."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """Called when training is complete; collective calls are still possible."""


class HookCaller:
    """Calls only overridden methods, so an empty hook costs nothing per step."""

    def __init__(self, trainer: Trainer, hooks: Sequence[Hook]) -> None:
        self._trainer = trainer
        self._by_name: dict[str, list[Callable[..., None]]] = {
            name: [
                getattr(hook, name)
                for hook in hooks
                if getattr(type(hook), name) is not getattr(Hook, name)
            ]
            for name in vars(Hook)
            if name.startswith("on_")
        }

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call every hook that overrides `name`."""
        for method in self._by_name[name]:
            try:
                method(self._trainer, *arguments)
            except Exception as error:
                blame(error, f"the hook {getattr(method, '__qualname__', name)}")
                raise
