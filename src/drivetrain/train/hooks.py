"""Hooks: be told, and act, at fixed places of the loop. Named as Lightning's users know them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import blame

if TYPE_CHECKING:
    from drivetrain.train.history import EvaluationResult, StepMetrics
    from drivetrain.train.trainer import Trainer


class Hook:
    """Override what is needed; every method gets the trainer first. Runs on every rank.

    Steps count from 1, here as in History, logs and checkpoints: `step` is the one under way, or
    the one just made. A hook with `state_dict` and `load_state_dict` is saved with the run.
    """

    def on_setup(self, trainer: Trainer) -> None:
        """Model, optimizer and data are made; what a checkpoint holds is loaded after this.

        The place to build what has a state of its own: an EMA of the model, for example.
        """

    def on_fit_start(self, trainer: Trainer) -> None:
        """All is ready, and restored where the run is resumed; no step has been made."""

    def on_train_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        """Before the first step of an epoch."""

    def on_train_batch_start(self, trainer: Trainer, step: int) -> None:
        """Before a step."""

    def on_before_optimizer_step(self, trainer: Trainer, step: int) -> None:
        """Gradients are complete and clipped."""

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        """After a step."""

    def on_log(self, trainer: Trainer, metrics: Sequence[StepMetrics]) -> None:
        """The steps since the last log, reduced over all ranks."""

    def on_train_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        """After the last step of an epoch."""

    def on_validation_start(self, trainer: Trainer, step: int) -> None:
        """Before an evaluation."""

    def on_validation_end(self, trainer: Trainer, result: EvaluationResult) -> None:
        """After an evaluation."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Training stopped by an error, which is raised again afterwards."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """Everything is done; ranks still stand together."""


class HookCaller:
    """Calls only what somebody overrode: an empty hook costs nothing per step."""

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
