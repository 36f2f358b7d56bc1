"""What a rank of a stage hands to collectives in one step: bytes by kind and axis.

Bytes are those of the whole, as everywhere: what a gather gives, what a reduce-scatter is given.
Small ones that every strategy has beside these (counts, losses, norms) are left out.
"""

from __future__ import annotations

from collections import defaultdict

from drivetrain.plan.candidate import Candidate
from drivetrain.plan.cost.context import rank_parts
from drivetrain.plan.cost.stages import stage_parts
from drivetrain.plan.profile.model import ModelProfile

Exchanged = dict[tuple[str, str], float]
"""By (collective, axes)."""


def exchanged_bytes(profile: ModelProfile, candidate: Candidate, stage: int) -> Exchanged:
    """What the strategy sends, and tp, cp and pp."""
    layout = candidate.layout
    numbers = rank_parts(profile, candidate)
    indices = stage_parts(profile, layout.pp)[stage]
    turns = candidate.accumulation
    found: Exchanged = defaultdict(float)
    for index in indices:
        part = numbers[index]
        for kind, num_bytes, _ in (*part.forward.exchanges, *part.backward.exchanges):
            found[kind, "tp"] += turns * num_bytes
    parts = [numbers[index] for index in indices]
    is_root = [index in (0, len(numbers) - 1) for index in indices]
    for each in candidate.cost.exchanges(parts, is_root, candidate.use):
        found[each.kind, " × ".join(each.axes)] += each.times * each.num_bytes
    if layout.cp > 1:  # keys and values of each block; what gathers the model's output is left out
        hidden = profile.hand_over_bytes.one(candidate.micro_batch_size, 1.0, layout.tp)
        both = turns * profile.shape.num_blocks * 2 * hidden
        found["all_gather", "cp"] += both * (2 if candidate.recompute == "none" else 3)
        found["reduce_scatter", "cp"] += both
    if layout.pp > 1:
        size = (candidate.micro_batch_size, 1.0 / layout.cp, layout.tp)
        hidden = profile.hand_over_bytes.one(*size)
        sides = int(stage > 0) + int(stage < layout.pp - 1)
        for kind in ("send", "recv"):
            found[kind, "pp"] += turns * sides * hidden
    return {key: value for key, value in found.items() if value}
