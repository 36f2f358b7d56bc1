"""Which checkpoints to keep: a pure function of steps and scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from drivetrain.config.schema import Checkpoint


def outdated(
    steps: Sequence[int], rule: Checkpoint, scores: Mapping[int, float] | None = None
) -> list[int]:
    """Return the steps whose checkpoints may be deleted; `scores`: `keep_best`'s metric by step.

    The newest checkpoint is always kept.
    """
    newest_first = sorted(set(steps), reverse=True)
    kept = set(newest_first[: max(rule.keep_last, 1)])
    if rule.keep_every is not None:
        kept |= {step for step in newest_first if step % rule.keep_every == 0}
    if rule.keep_best is not None:
        finite = {step for step, score in (scores or {}).items() if math.isfinite(score)}
        scored = [step for step in newest_first if step in finite]
        if scored and scores is not None:
            sign = 1 if rule.keep_best_mode == "min" else -1
            kept.add(min(scored, key=lambda step: (sign * scores[step], step)))  # first of equals
    return [step for step in newest_first if step not in kept]
