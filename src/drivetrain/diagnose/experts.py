"""Hot experts: those that get a multiple of their share of the tokens in record after record."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.diagnose.finding import Finding, Kind, Severity
from drivetrain.record.expert_load import LoadRecord, busiest

HOT = 3.0
"""An expert is hot from this multiple of its share …"""
_OF_THE_MOST = 0.75
"""… or from this fraction of the most it can get: a token goes to an expert at most once, so with 2
of 4 experts chosen none gets more than twice its share."""
RECORDS = 5
"""The same expert must be hot in this many consecutive records."""


def hot_expert(records: Sequence[LoadRecord]) -> Finding | None:
    """Return the hottest expert of the last records if it is hot in all of them."""
    last = records[-RECORDS:]
    if len(last) < RECORDS:
        return None
    found = []
    for layer in set.intersection(*(set(record.layers) for record in last)):
        tokens = [record.layers[layer] for record in last]
        at = {max(range(len(each)), key=each.__getitem__) for each in tokens}
        times = min(busiest(each) for each in tokens)
        most = len(tokens[0]) / last[-1].num_chosen
        if len(at) == 1 and times >= min(HOT, _OF_THE_MOST * most):
            found.append((times, layer, at.pop()))
    if not found:
        return None
    times, layer, expert = max(found)
    newest = last[-1].layers[layer]
    others = f"; {len(found) - 1} more layers have a hot expert" if len(found) > 1 else ""
    return Finding(
        Severity.WARNING,
        Kind.HOT_EXPERT,
        f"expert {expert} of {layer} has received at least {times:.1f} times its share of the "
        f"tokens since step {last[0].step:,}: the other experts learn less, and its rank takes "
        "longest",
        "raise the weight of the load-balancing loss, or the update rate of the router's bias; for "
        "a collapsed router, try a lower learning rate or noise",
        evidence=(
            f"tokens of each of the {len(newest)} experts up to step {last[-1].step:,}: "
            f"{', '.join(map(str, newest[:32]))}{', …' if len(newest) > 32 else ''}{others}",
        ),
        step=last[-1].step,
    )
