"""FSDP2's walk through a step: shards at rest, whole weights while a block is at work.

What torch's `fully_shard` does on the way, in bytes: `U` a part's weights in the compute precision,
`R` its gradients in the precision they are reduced in, `r` the root (all that is in no block),
whose weights stay whole from its forward to the end of backward.

    forward, block i     U_r + 2·U_i      the whole weights, and the gather they were copied from
    backward, block i    U_r + U_i + U_(i-1) + R_(i+1)    the next gather is under way, the last
                                          reduction's input is held
    end of block i       U_r + U_(i-1) + gradients of i + R_i + R_i/n + a hidden state on its way
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from drivetrain.strategies.cost import Held, Moment, PartNumbers, Walk

Between = Literal["none", "shards", "whole"]
"""What there is of gradients when a micro-batch begins."""


class ShardedWalk(Walk):
    """One rank's stage, weights in `num_shards` shards."""

    def __init__(
        self,
        parts: Sequence[PartNumbers],
        is_root: Sequence[bool],
        num_shards: int,
        compute_ratio: float,
        hidden: float,
        *,
        between: Between,
    ) -> None:
        self._parts = parts
        self._shards = num_shards
        self._ratio = compute_ratio
        self._hidden = hidden
        self._between = between
        self._is_root = is_root
        self._root = sum(
            p.parameters * compute_ratio for p, root in zip(parts, is_root, strict=True) if root
        )
        self._root_trained = sum(p.trained for p, root in zip(parts, is_root, strict=True) if root)

    def held(self) -> Held:
        """Shards; buffers whole."""
        parts, shards = self._parts, self._shards
        return Held(
            sum(part.parameters for part in parts) / shards,
            sum(part.optimizer for part in parts) / shards,
            sum(part.buffers for part in parts),
        )

    def gradient_shards(self) -> float:
        """All of this rank's gradients, reduced."""
        return sum(part.trained for part in self._parts) / self._shards

    def forward(self) -> list[Moment]:
        """Each block's weights are whole while it runs."""
        points: list[Moment] = []
        saved = 0.0
        waiting = self._accumulated(len(self._parts)) + self._earlier_shards()
        for index, part in enumerate(self._parts):
            # the gather before this one is freed when this one has arrived
            earlier = self._root if index == 1 and self._is_root[0] else self._whole(index - 1)
            own = self._root if index == 0 and self._is_root[0] else 2 * self._whole(index)
            gathered = self._root + max(own, earlier + self._whole(index))
            points.append(Moment("forward", saved + part.forward.peak, waiting, gathered))
            saved += part.saved
        return points

    def backward(self) -> list[Moment]:
        """Whole gradients of a block are reduced to shards when its backward is through."""
        points: list[Moment] = []
        saved = sum(part.saved for part in self._parts)
        last = len(self._parts) - 1
        root_gradients, shards_made, held_input = 0.0, self._earlier_shards(), 0.0
        for index in range(last, -1, -1):
            part, work = self._parts[index], self._parts[index].backward
            saved -= part.saved
            own = work.peak_with_gradients - work.peak
            before = self._whole(index - 1)
            gradients = root_gradients + shards_made + self._accumulated(index + 1)
            gathered = self._root + self._whole(index) + held_input
            if self._is_root[index]:
                # the next gather begins when the loss's own backward is through
                points.append(Moment("backward", saved + work.peak, gradients + own, gathered))
                end = saved + max(work.end, 0.0) + self._hidden
                points.append(
                    Moment("backward", end, gradients + work.gradients, gathered + before)
                )
                root_gradients += work.gradients
                continue
            points.append(Moment("backward", saved + work.peak, gradients + own, gathered + before))
            reduced = part.trained
            points.append(
                Moment(
                    "backward",
                    saved + work.end + self._hidden,
                    gradients + work.gradients,
                    self._root + before + reduced * (1 + 1 / self._shards),
                )
            )
            if self._between != "shards":  # or it is added to the one that is there
                shards_made += reduced / self._shards
            held_input = reduced
        # its whole weights are given back before its gradients are reduced
        end = self._root_trained * (1 + 1 / self._shards)
        points.append(Moment("backward", 0.0, root_gradients + shards_made, end))
        return points

    def optimizer(self, extra: float) -> Moment:
        """On this rank's shards."""
        return Moment("optimizer", extra, self.gradient_shards())

    def _whole(self, index: int) -> float:
        """A block's weights, put together; the root's are counted by themselves."""
        if not 0 <= index < len(self._parts) or self._is_root[index]:
            return 0.0
        return self._parts[index].parameters * self._ratio

    def _earlier_shards(self) -> float:
        return self.gradient_shards() if self._between == "shards" else 0.0

    def _accumulated(self, upto: int) -> float:
        """Whole gradients of earlier micro-batches, of the parts not yet reduced."""
        if self._between != "whole":
            return 0.0
        root = self._root_trained
        blocks = sum(
            part.trained
            for index, part in enumerate(self._parts[:upto])
            if not self._is_root[index]
        )
        return root + blocks
