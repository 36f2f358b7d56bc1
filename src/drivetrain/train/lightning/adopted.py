"""A LightningModule driven by a run: its steps go through the wrapped model's `__call__`.

The module's class is replaced by a subclass of it, so names of weights, hyperparameters and methods
do not change. Called with a `Step`, the module runs that step, so that ddp and fsdp see a forward;
called inside a step, it runs the user's own forward.
"""

from __future__ import annotations

import copy
import enum
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from drivetrain.train.lightning.link import LightningLink


class Step(enum.Enum):
    """Which of a module's steps to run."""

    TRAINING = "training_step"
    VALIDATION = "validation_step"


_LINK = "_drivetrain_link"


def adopt(module: Any, link: LightningLink) -> Any:
    """Replace the module's class so that a run can drive it through `link`."""
    kind = type(module)
    if not issubclass(kind, _Adopted):
        body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        module.__class__ = type(kind)(  # type: ignore[misc]
            kind.__name__, (_Adopted, kind), body
        )
    module.__dict__[_LINK] = link
    return module


class _Adopted:
    """What the module uses in place of Lightning's Trainer."""

    __dict__: dict[str, Any]

    @property
    def _link(self) -> LightningLink:
        link: LightningLink = self.__dict__[_LINK]
        return link

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._link.step is not None:  # the call of the step has run all hooks already
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's forward, or a step."""
        if not args or not isinstance(args[0], Step):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        step, batch, index = args
        run = getattr(self, step.value)
        with self._link.running(step):
            return run(batch, index) if _takes_index(run) else run(batch)

    @property
    def trainer(self) -> Any:
        return self._link.view

    @property
    def current_epoch(self) -> int:
        return int(self._link.view.current_epoch)

    @property
    def global_step(self) -> int:
        return int(self._link.view.global_step)

    @property
    def global_rank(self) -> int:
        return int(self._link.view.global_rank)

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters())).device  # type: ignore[attr-defined,no-any-return]

    @property
    def logger(self) -> None:
        self._link.say_once(
            "warning: self.logger is None here: use self.log, or the Trainer's log_image and "
            "log_text (docs/observability.md)"
        )

    @property
    def loggers(self) -> list[Any]:
        return []

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._link.view.is_global_zero:
            print(*args, **kwargs)  # noqa: T201 - requested by the user

    def log(self, name: str, value: Any, *_: Any, **options: Any) -> None:
        self._link.log(name, value, options)

    def log_dict(self, dictionary: Any, *_: Any, **options: Any) -> None:
        self._link.log_all(dictionary, options)

    def optimizers(self, *_: Any, **__: Any) -> Any:
        raise _not_here("optimizers", "use trainer.assembly.engine.optimizer in a hook")

    def lr_schedulers(self) -> Any:
        raise _not_here("lr_schedulers", "remove the call: the run steps schedulers")

    def manual_backward(self, *_: Any, **__: Any) -> None:
        raise _not_here("manual_backward", "return the loss, or write your own loop")

    def all_gather(self, *_: Any, **__: Any) -> Any:
        raise _not_here("all_gather", "remove the call: logged values are averaged over all ranks")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the module, but not the run that drives it."""
        memo[id(self._link)] = self._link
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        return copied


def _takes_index(step: Any) -> bool:
    parameters = inspect.signature(step).parameters.values()
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(places) >= 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _not_here(name: str, remedy: str) -> ConfigError:
    return ConfigError(
        [Problem(f"self.{name}()", "is not supported here", remedy, has_value=False)]
    )


def loss_in(returned: Any) -> Any:
    """Return the loss from what training_step returned."""
    return returned["loss"] if isinstance(returned, Mapping) and "loss" in returned else returned
