"""The loop for a pipelined model: a step's micro-batches go through the pipeline together.

Micro-batches of one shape form one pass. A step with different shapes (a short last batch, lines of
different lengths) makes several passes, whose gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch

from drivetrain.data.batches import MicroBatch
from drivetrain.data.device import to_device
from drivetrain.data.feed import Turn
from drivetrain.parallel.pipeline.pipelined import Pipelined
from drivetrain.train.loop import Loop


class PipelinedLoop(Loop):
    """A Loop that passes a step's micro-batches to the pipeline together."""

    def _go_through(self, turns: Iterator[Turn]) -> None:
        asked = self.timer.now()
        taken = [next(turns) for _ in range(self.feed.plan.accumulation)]
        self.timer.waited_for_data(asked)
        self._open_step(taken[0][0])
        device = self.engine.world.device
        wanted = [(m, to_device(batch, device)) for m, batch in taken if self.engine.wants(m)]
        spread = self.engine.spread
        if not isinstance(spread, Pipelined):
            raise TypeError("only a model in stages can be pipelined")
        shapes = spread.same_for_all([_shape(batch) for _, batch in wanted])
        for shape, group in groupby(zip(shapes, wanted, strict=True), key=itemgetter(0)):
            self._pass(spread, shape, [turn for _, turn in group])

    def _pass(
        self, spread: Pipelined, shape: Hashable, group: list[tuple[MicroBatch, Any]]
    ) -> None:
        engine, loss = self.engine, self.task.loss

        def compute(model: Callable[..., Any], index: int, stage: int) -> torch.Tensor:
            micro, batch = group[index]
            is_last = index == len(group) - 1
            with engine.micro_batch(micro, is_last=is_last, stage=stage), engine.autocast:
                result = loss(model, batch)  # type: ignore[arg-type]  # called like a module
            weighted = engine.weighted(result, micro)
            engine.note_loss(result, micro)
            return weighted

        def probe(model: Callable[..., Any]) -> None:
            with engine.autocast:
                loss(model, group[0][1])  # type: ignore[arg-type]

        spread.run(len(group), shape, compute, probe)


def _shape(batch: Any) -> Any:
    """Return the shapes and dtypes that micro-batches of one pass must share."""
    if isinstance(batch, torch.Tensor):
        return tuple(batch.shape), batch.dtype
    if isinstance(batch, dict):
        return tuple((key, _shape(value)) for key, value in batch.items())
    if isinstance(batch, (list, tuple)):
        return tuple(_shape(value) for value in batch)
    return None
