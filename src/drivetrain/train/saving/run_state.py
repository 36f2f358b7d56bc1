"""RunState: the state of a run that checkpoints store, and how it is restored."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from drivetrain.checkpoint.frozen import FrozenBase
from drivetrain.checkpoint.gathered import GatheredState
from drivetrain.checkpoint.state import TrainingState, Value, saved_groups
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.stateful import Stateful
from drivetrain.data.stream import StreamFeed
from drivetrain.parallel.model import own_name
from drivetrain.train.assemble import Assembly
from drivetrain.train.history import EvaluationResult, History
from drivetrain.train.optimization.groups import IMPLEMENTATION
from drivetrain.train.optimization.schedule import Occasion


@dataclass
class Position:
    """Position of a run."""

    step: int = 0
    """Completed steps."""
    epoch: int = -1
    evaluated_at: int = -1
    """Step of the last evaluation."""
    stopped: str = ""
    """Why the run was ended early; empty if it was not."""


class RunState:
    """The state of a run; `stateful` holds the user's objects that are saved too."""

    def __init__(
        self, assembly: Assembly, history: History, stateful: Mapping[str, Stateful]
    ) -> None:
        self._assembly = assembly
        self._history = history
        self._stateful = stateful
        self.at = Position()
        self._began_s = time.perf_counter()
        self.earlier_s = 0.0
        """Seconds of earlier attempts, up to the checkpoint; the same on every rank."""
        self._base = _frozen_base(assembly)
        self._settings = [
            {key: value for key, value in group.items() if key != "params"}
            for group in assembly.engine.optimizer.param_groups
        ]

    def whole(self) -> TrainingState:
        """Return the whole state in the checkpointer's form."""
        engine, feed, world = self._assembly.engine, self._assembly.feed, self._assembly.world
        common: dict[str, Stateful] = {
            "run": Value(self._get_run, self._set_run),
            "feed": feed,
            "learning_rate": engine.learning_rate,
            **engine.scalers(),
        }
        own = {**self._stateful, **engine.spread.private_state(engine.optimizer)}
        if engine.averages is not None:
            common["ema"] = engine.averages
        if isinstance(feed, StreamFeed):
            own["stream"] = Value(
                lambda: feed.own_state, lambda state: setattr(feed, "own_state", state)
            )
        spread = engine.spread
        model, optimizer = spread.inner, engine.optimizer
        parts = (model, optimizer, world.rank, common, own, world.is_first_copy, world.accelerator)
        users = frozenset(self._stateful)
        if spread.engine_step is not None:
            return GatheredState(*parts, users=users, keeper=spread.engine_step)
        averages = {} if engine.averages is None else engine.averages.tensors
        return TrainingState(*parts, self._base, users, averages)

    def left_out(self) -> set[str]:
        """Return the names of weights that checkpoints leave out. A collective call."""
        names = set() if self._base is None else self._base.unchanged()
        return {name.removeprefix("model.") for name in names}

    def take_own_settings(self, keys: Collection[str] | None = None) -> None:
        """Reset the optimizer's groups to their initial settings instead of the saved ones."""
        groups = self._assembly.engine.optimizer.param_groups
        for group, settings in zip(groups, self._settings, strict=True):
            group.update({k: v for k, v in settings.items() if keys is None or k in keys})

    def begin_schedule_anew(self) -> None:
        """Compute the learning rate from the current settings instead of the saved ones."""
        self.take_own_settings()
        num_done: dict[Occasion, int] = {"step": self.at.step, "epoch": max(0, self.at.epoch)}
        found = [result.metrics for result in self._history.evaluations if result.step]
        self._assembly.engine.learning_rate.begin_anew(num_done, found)

    def position(self, step: int) -> dict[str, Any]:
        """Return the run's position for the manifest."""
        return {"step": step, "epoch": self.at.epoch, "samples": self._samples(step)}

    @property
    def keeps_objects(self) -> bool:
        """True if the user passed objects to be saved."""
        return bool(self._stateful)

    @property
    def seconds(self) -> float:
        """Seconds spent on the run; earlier attempts are included only with max_time_s."""
        return self.earlier_s + time.perf_counter() - self._began_s

    def note_end(self, reason: str) -> None:
        """Record why the run ends before its last step."""
        self._history.stopped = reason

    def best(self) -> EvaluationResult | None:
        """Return the best evaluation by `keep_best`; ConfigError if none has that metric."""
        rule = self._assembly.config.checkpoint
        if rule.keep_best is None:
            return None
        self._history.with_metric(rule.keep_best, "checkpoint.keep_best")
        return self._history.best(rule.keep_best, rule.keep_best_mode)

    @property
    def num_evaluations(self) -> int:
        """Number of evaluations so far, including earlier attempts."""
        return len(self._history.evaluations)

    def evaluated(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a checkpoint's values, updated with later evaluations and what depends on them."""
        run, engine = values["common"]["run"]["value"], self._assembly.engine
        at = {**run["at"], "evaluated_at": self.at.evaluated_at}
        run = {**run, **self._found(), "at": at}
        rate = engine.learning_rate.state_dict()
        common = {**values["common"], "run": {"value": run}, "learning_rate": rate}
        groups = saved_groups(engine.optimizer)
        return {
            **values,
            "common": common,
            "optimizer": {**values["optimizer"], "groups": groups},
        }

    def _found(self) -> dict[str, Any]:
        best = self.best()
        return {
            **({} if best is None else {"best_step": best.step}),
            "evaluations": [
                [result.step, dict(result.metrics), result.num_samples]
                for result in self._history.evaluations
            ],
        }

    def _get_run(self) -> dict[str, Any]:
        # the time is never the same twice: stored only if it affects the run
        is_limited = self._assembly.config.max_time_s is not None
        return {
            **({"seconds": self.seconds} if is_limited else {}),
            "at": asdict(self.at),
            "skipped_steps": self._history.skipped_steps,
            **self._found(),
        }

    def _set_run(self, run: dict[str, Any]) -> None:
        for name, value in run["at"].items():
            setattr(self.at, name, value)
        self.earlier_s = run.get("seconds", 0.0)
        self._history.resumed_step = self.at.step
        self._history.stopped = self.at.stopped
        self._history.skipped_steps = run.get("skipped_steps", 0)
        # the checkpoint's groups were restored before this
        self.take_own_settings(IMPLEMENTATION)
        self._history.evaluations = [EvaluationResult(*entry) for entry in run["evaluations"]]

    def _samples(self, step: int) -> int | None:
        """Return the samples used so far, if an epoch's length is known."""
        plan = self._assembly.feed.plan
        if plan.length is None:
            return None
        position = plan.position(step)
        return position.epoch * plan.length + position.samples


def _frozen_base(assembly: Assembly) -> FrozenBase | None:
    """Return the frozen weights if only trained ones are saved, else None."""
    if assembly.config.checkpoint.contents != "trained":
        return None
    spread = assembly.engine.spread
    if spread.engine_step is not None:
        strategy = assembly.config.parallel.strategy
        rule = f"{strategy} manages the weights itself, so changes to them cannot be detected"
        remedy = "use everything, or a different parallel.strategy"
        raise ConfigError([Problem("checkpoint.contents", rule, remedy, "trained")])
    # with every name of tied weights, like the state dict
    parameters = spread.inner.named_parameters(remove_duplicate=False)
    frozen = {f"model.{own_name(name)}" for name, p in parameters if not p.requires_grad}
    tensors = TrainingState(spread.inner, None).model_tensors()
    held = {name: tensor for name, tensor in tensors.items() if name in frozen}
    return FrozenBase(held, assembly.world.sum_floats)
