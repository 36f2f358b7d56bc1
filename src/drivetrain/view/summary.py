"""The top of a report: key figures and a summary paragraph."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drivetrain.core.text import counted, readable_rate
from drivetrain.diagnose.finding import Severity
from drivetrain.record.status import NO_END
from drivetrain.view.palette import words
from drivetrain.view.run_view import RunView
from drivetrain.view.series import duration_text, number_text

# The key figures at the top.

_RATES = (("throughput/tokens_per_sec", "tokens/s"), ("throughput/samples_per_sec", "samples/s"))


def key_figures(run: RunView) -> list[tuple[str, str]]:
    """Return (name, value) of the figures that are available."""
    is_through = run.total_steps is None or run.step >= run.total_steps
    of = "" if is_through else f" of {run.total_steps:,}"
    shown = [("steps", f"{run.step:,}{of}"), ("wall clock", duration_text(run.wall_s))]
    if run.ledger is not None and run.ledger.wall_s:
        shown.append(("goodput", f"{run.ledger.share('productive'):.1%}"))
    loss = run.scalar("train/loss")
    if not loss.is_empty:
        shown.append(("loss", number_text(loss.last)))
    for name, unit in _RATES:
        rate = typical(run, name)
        if rate is not None:
            shown.append((f"{unit}, median", readable_rate(rate)))
            break
    if run.attempts:
        shown.append(("ranks", f"{run.attempts[-1].num_ranks:,}"))
        shown.append(("attempts", f"{len(run.attempts):,}"))
    return shown


def typical(run: RunView, name: str) -> float | None:
    """Return a scalar's median; a rate's mean would be lowered by the slow start."""
    values = sorted(v for v in run.scalar(name).values.tolist() if math.isfinite(v))
    return values[len(values) // 2] if values else None


def planned_and_measured(run: RunView, plan: Mapping[str, Any]) -> RunView:
    """Return the run with its plan's rows; unchanged if there is no plan."""
    if not plan.get("plans"):
        return run
    best, samples = plan["plans"][0], plan["question"]["global_batch_size"]
    samples_per_s = typical(run, "throughput/samples_per_sec")
    if not samples_per_s:
        return run
    rows = (
        ("step", float(best["step_s"]["total"]), samples / samples_per_s, "s"),
        ("samples", float(best["samples_per_s"]), samples_per_s, "samples/s"),
    )
    return replace(run, plan=rows)


# The paragraph at the top: the outcome, where the time went, and the worst finding.


def verdict(run: RunView) -> str:
    """Return the summary: a few sentences, the most important first."""
    said = [_outcome(run), _failures(run), _time(run), _loss(run), _findings(run)]
    return " ".join(sentence for sentence in said if sentence)


def _outcome(run: RunView) -> str:
    ranks = run.attempts[-1].num_ranks if run.attempts else 0
    on = f" on {counted(ranks, 'rank')}" if ranks else ""
    took = duration_text(run.wall_s)
    of = f" of {run.total_steps:,}" if run.total_steps else ""
    done = f"{run.step:,}{of} steps" if of else counted(run.step, "step")
    match run.state:
        case "finished":
            return f"Finished {done}{on} in {took}."
        case "running":
            return f"Running{on}: {done} after {took}."
        case "preempted":
            step = f"step {run.step:,}{of}{on}"
            return _stopped(run, step)
        case "restarting":
            return f"Restarting{on} after step {run.step:,}{of}, {took} into the run."
        case "quiet":
            said = f"Nothing has been written for a while; last seen at step {run.step:,}{of}{on}"
            return as_sentence(f"{said}: {run.attempts[-1].what or NO_END}")
    last = _reason(run)
    ended = f"Ended as {run.state} after step {run.step:,}{of}{on}"
    return as_sentence(f"{ended}: {last}" if last else ended)


def _stopped(run: RunView, step: str) -> str:
    if any(saved.step == run.step for saved in run.checkpoints):
        return f"Stopped and saved after {step}; it can be resumed."
    said, why = f"Stopped at {step}, which was not saved", _reason(run)
    return as_sentence(f"{said}: {why}" if why else said)


def _reason(run: RunView) -> str:
    """Return why the last attempt ended; empty if the summary's finding says so."""
    if not run.attempts:
        return ""
    last, worst = run.attempts[-1], next(iter(run.findings or ()), None)
    if worst is not None and worst.severity is Severity.ERROR and worst.attempt == last.number:
        return ""
    return last.what


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
        return f"The loss is no longer finite: {loss.last} at step {loss.steps[-1]:,.0f}."
    if loss.broken_steps.size:
        return f"The loss was not finite at step {loss.broken_steps[0]:,.0f}."
    first = float(loss.values[0])
    if loss.last == first:
        return f"The loss is {number_text(first)}, as at the start."
    moved = "fell" if loss.last < first else "rose"
    return f"The loss {moved} from {number_text(first)} to {number_text(loss.last)}."


def _findings(run: RunView) -> str:
    if not run.findings:
        return ""
    worst = run.findings[0]
    more = len(run.findings) - 1
    also = f" ({counted(more, 'more finding')} below)" if more else ""
    return f"{as_sentence(worst.what).removesuffix('.')}{also}."


def as_sentence(words: str) -> str:
    """Capitalize the text and end it with a full stop."""
    ended = words if words.endswith((".", "!", "?")) else f"{words}."
    return ended[:1].upper() + ended[1:]
