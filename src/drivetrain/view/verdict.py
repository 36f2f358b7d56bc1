"""The paragraph at the top: what became of the run, where its time went, what to look at."""

from __future__ import annotations

import math
from collections import Counter

from drivetrain.view.palette import words
from drivetrain.view.run_view import RunView
from drivetrain.view.scale import duration_text, number_text


def verdict(run: RunView) -> str:
    """A few sentences, the most important first."""
    said = [_outcome(run), _failures(run), _time(run), _loss(run), _findings(run)]
    return " ".join(sentence for sentence in said if sentence)


def _outcome(run: RunView) -> str:
    ranks = run.attempts[-1].num_ranks if run.attempts else 0
    on = f" on {ranks:,} {_plural('rank', ranks)}" if ranks else ""
    took = duration_text(run.wall_s)
    of = f" of {run.total_steps:,}" if run.total_steps else ""
    match run.state:
        case "finished":
            return f"Finished {run.step:,}{of} steps{on} in {took}."
        case "running":
            return f"Running{on}: {run.step:,}{of} steps after {took}."
        case "preempted":
            return f"Stopped and saved after step {run.step:,}{of}{on}; it can be gone on with."
        case "restarting":
            return f"Starting again{on} after step {run.step:,}{of}, {took} into the run."
        case "quiet":
            return f"Nothing has been written for a while; last seen at step {run.step:,}{of}{on}."
    last = run.attempts[-1].what if run.attempts else ""
    return f"Ended as {run.state} after step {run.step:,}{of}{on}" + (f": {last}." if last else ".")


def _failures(run: RunView) -> str:
    earlier = Counter(attempt.kind for attempt in run.attempts[:-1])
    if not earlier:
        return ""
    kinds = ", ".join(f"{count} {kind}" for kind, count in earlier.most_common())
    return f"It took {len(run.attempts)} attempts ({kinds} before the last)."


def _time(run: RunView) -> str:
    ledger = run.ledger
    if ledger is None or not ledger.wall_s:
        return ""
    lost = {name: s for name, s in ledger.seconds.items() if name != "productive" and s > 0}
    share = f"{ledger.share('productive'):.0%} of the time went into productive steps"
    if not lost:
        return f"{share}."
    name = max(lost, key=lambda each: lost[each])
    return (
        f"{share}; most of the rest was {words(name)} "
        f"({duration_text(lost[name])}, {ledger.share(name):.0%})."
    )


def _loss(run: RunView) -> str:
    loss = run.scalar("train/loss")
    if loss.is_empty:
        return ""
    if not math.isfinite(loss.last):
        return f"The loss is no longer a number: {loss.last} at step {loss.steps[-1]:,.0f}."
    if loss.broken_steps.size:
        return f"The loss was not a number at step {loss.broken_steps[0]:,.0f}."
    first = float(loss.values[0])
    moved = "fell" if loss.last < first else "rose"
    return f"The loss {moved} from {number_text(first)} to {number_text(loss.last)}."


def _findings(run: RunView) -> str:
    if not run.findings:
        return ""
    worst = run.findings[0]
    more = len(run.findings) - 1
    also = f" ({more} more {_plural('finding', more)} below)" if more else ""
    return f"{as_sentence(worst.what).removesuffix('.')}{also}."


def as_sentence(words: str) -> str:
    """With a capital, and a full stop."""
    ended = words if words.endswith((".", "!", "?")) else f"{words}."
    return ended[:1].upper() + ended[1:]


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
