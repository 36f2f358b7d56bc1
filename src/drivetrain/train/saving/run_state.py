"""RunState: what a checkpoint holds of a run, and what becomes of it when one is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from drivetrain.checkpoint.gathered import GatheredState
from drivetrain.checkpoint.state import TrainingState, Value
from drivetrain.core.stateful import Stateful
from drivetrain.data.stream import StreamFeed
from drivetrain.train.assemble import Assembly
from drivetrain.train.history import EvaluationResult, History
from drivetrain.train.optimizer_groups import IMPLEMENTATION


@dataclass
class Position:
    """Where a run stands."""

    step: int = 0
    """Steps done."""
    epoch: int = -1
    evaluated_at: int = -1
    """The step of the last evaluation."""


class RunState:
    """`stateful` is what the user wants to be saved, too."""

    def __init__(
        self, assembly: Assembly, history: History, stateful: Mapping[str, Stateful]
    ) -> None:
        self._assembly = assembly
        self._history = history
        self._stateful = stateful
        self.at = Position()
        self._settings = [
            {key: value for key, value in group.items() if key != "params"}
            for group in assembly.engine.optimizer.param_groups
        ]

    def whole(self) -> TrainingState:
        """Everything, as the checkpointer takes and gives it."""
        engine, feed, world = self._assembly.engine, self._assembly.feed, self._assembly.world
        common: dict[str, Stateful] = {
            "run": Value(self._get_run, self._set_run),
            "feed": feed,
        }
        own = {**self._stateful, **engine.spread.private_state(engine.optimizer)}
        if engine.scaler is not None:
            common["scaler"] = engine.scaler
        if isinstance(feed, StreamFeed):
            own["dataset"] = Value(
                lambda: feed.dataset_state, lambda state: setattr(feed, "dataset_state", state)
            )
        spread = engine.spread
        model, optimizer = spread.inner, engine.optimizer
        parts = (model, optimizer, world.rank, common, own, world.is_first_copy, world.accelerator)
        if spread.engine_step is not None:
            return GatheredState(*parts, keeper=spread.engine_step)
        return TrainingState(*parts)

    def take_own_settings(self, keys: Collection[str] | None = None) -> None:
        """Let the optimizer's groups be as they were made, not as they were saved."""
        groups = self._assembly.engine.optimizer.param_groups
        for group, settings in zip(groups, self._settings, strict=True):
            group.update({k: v for k, v in settings.items() if keys is None or k in keys})

    def position(self, step: int) -> dict[str, Any]:
        """What the manifest says of where the run stands."""
        return {"step": step, "epoch": self.at.epoch, "samples": self._samples(step)}

    def _get_run(self) -> dict[str, Any]:
        return {
            "at": asdict(self.at),
            "skipped_steps": self._history.skipped_steps,
            "evaluations": [
                [result.step, dict(result.metrics), result.num_samples]
                for result in self._history.evaluations
            ],
        }

    def _set_run(self, run: dict[str, Any]) -> None:
        for name, value in run["at"].items():
            setattr(self.at, name, value)
        self._history.resumed_step = self.at.step
        self._history.skipped_steps = run.get("skipped_steps", 0)
        # the checkpoint's groups have been put back before this
        self.take_own_settings(IMPLEMENTATION)
        self._history.evaluations = [EvaluationResult(*entry) for entry in run["evaluations"]]

    def _samples(self, step: int) -> int | None:
        """Used so far, where an epoch's length is known."""
        plan = self._assembly.feed.plan
        if plan.length is None:
            return None
        position = plan.position(step)
        return position.epoch * plan.length + position.samples
