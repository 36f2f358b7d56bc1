"""Hot experts: those that get a multiple of their share of the tokens, record after record."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.diagnose.finding import Finding, Kind, Severity
from drivetrain.record.expert_load import LoadRecord, busiest

HOT = 3.0
"""Times its share, from which on an expert is hot …"""
_OF_THE_MOST = 0.75
"""… or this part of what it can get at most: a token goes to an expert once, so with 4 experts of
which 2 are chosen none gets more than twice its share."""
RECORDS = 5
"""In a row, in all of which it must be the same one."""


def hot_expert(records: Sequence[LoadRecord]) -> Finding | None:
    """The hottest one of the last records, if it is hot in all of them."""
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
    others = f"; {len(found) - 1} other layers have one, too" if len(found) > 1 else ""
    return Finding(
        Severity.WARNING,
        Kind.HOT_EXPERT,
        f"expert {expert} of {layer} gets {times:.1f} times its share of the tokens or more since "
        f"step {last[0].step:,}: the others learn less, and the rank that holds it works longest",
        "weigh the model's balance loss more, or raise the rate of its bias; a router that has "
        "collapsed is helped by a lower learning rate or noise",
        evidence=(
            f"tokens of its {len(newest)} experts up to step {last[-1].step:,}: "
            f"{', '.join(map(str, newest[:32]))}{', …' if len(newest) > 32 else ''}{others}",
        ),
        step=last[-1].step,
    )
