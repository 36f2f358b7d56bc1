"""Contract: the settings that determine a run's results, stored in checkpoints, compared on resume.

Resuming with another seed, other data or another learning rate is a different training run. It is
refused unless the user accepts each change by name. Changes that must not affect the results (the
layout, a library's version) are reported and allowed.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.traits import STRATEGIES, traits_of

Terms = Mapping[str, Any]
"""Plain values by key. None means unknown, which is not compared."""

_ONLY_SAID = {
    "micro_batch_size": "dropout and batch statistics differ from here on",
    "parallel.strategy": "",
    "layout": "",
    "precision.tf32": "matrix products round differently from here on",
    "communication.compression": "gradients are communicated differently from here on",
    "model.pretrained": "the checkpoint's weights are used",
    "torch": "its kernels may round differently",
    "python": "",
    "code": "what it computes may differ from here on",
    "drivetrain": "",
}
"""Settings that may change without being accepted, and what the change means."""

_ORDER = {"seed", "data.shuffle", "data.length"}
"""Settings that change the order of samples."""

_EARLIER: Terms = {
    "optimization.decay_norms_and_biases": True,
    "scheduler.class": "built-in",
}
"""Values assumed for checkpoints that do not store these keys."""

Outcome = Literal["refused", "accepted", "said"]


@dataclass(frozen=True)
class Change:
    """One setting that differs from the checkpoint."""

    key: str
    before: Any
    now: Any
    outcome: Outcome

    def __str__(self) -> str:
        meaning = _ONLY_SAID.get(self.key, "")
        if self.key in _ORDER:
            meaning = "this epoch's samples may be used twice, or not at all"
        word = " (accepted)" if self.outcome == "accepted" else ""
        before, now = apart(self.before, self.now)
        said = f"{self.key}: {shown(before)} → {shown(now)}{word}"
        if self.key == "code":  # digests say nothing to a reader
            said = f"{self.key}: {', '.join(before)}"
        return f"{said}; {meaning}" if meaning else said


class ContractChanged(ConfigError):
    """Settings that determine the run's results have changed. The error names all of them."""

    def __init__(self, folder: str, changes: Sequence[Change]) -> None:
        self.folder, self.changes = folder, tuple(changes)
        refused = [change for change in changes if change.outcome == "refused"]
        super().__init__([_problem(folder, change) for change in refused])

    def __reduce__(self) -> Any:
        return type(self), (self.folder, self.changes)


@dataclass(frozen=True)
class Contract:
    """The current settings of a run, and the keys whose change the user accepts."""

    terms: Terms = field(default_factory=dict)
    accepted: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        unknown = sorted(self.accepted - self.terms.keys())
        if unknown:
            raise ConfigError([_no_such(key, self.terms) for key in unknown])

    def compare(self, folder: str, before: Terms) -> list[Change]:
        """Return every setting that both sides know and that differs.

        Raise ContractChanged if one of them is neither accepted nor allowed to change.
        """
        before = {**(_EARLIER if before else {}), **before}
        different = {
            key: (before[key], now)
            for key, now in self.terms.items()
            if before.get(key) is not None and now is not None and _differs(key, before[key], now)
        }
        if "data.length" in different:  # the content is fingerprinted on other samples then
            different.pop("data.content", None)
        if "model" in different:  # which has other modules then, too
            different.pop("model.modules", None)
        changes = [
            Change(key, *values, _outcome(key, values, self.accepted, different))
            for key, values in different.items()
        ]
        if any(change.outcome == "refused" for change in changes):
            raise ContractChanged(folder, changes)
        return changes


def _differs(key: str, before: Any, now: Any) -> bool:
    if key == "code":  # what only one of them has imported is not compared
        return any(before[file] != now[file] for file in before.keys() & now.keys())
    return bool(before != now)


def apart(before: Any, now: Any) -> tuple[Any, Any]:
    """Of two mappings, return the entries that differ; of anything else, both values."""
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        return before, now
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return {k: before[k] for k in keys if k in before}, {k: now[k] for k in keys if k in now}


def _outcome(
    key: str, values: tuple[Any, Any], accepted: Collection[str], different: Collection[str]
) -> Outcome:
    if key in accepted and key != "model":  # missing weights would be lost
        return "accepted"
    if key == "model.modules" and "torch" in different:  # it may describe them in other words
        return "said"
    if key == "parallel.strategy" and any(map(_changes_training, values)):
        return "refused"
    return "said" if key in _ONLY_SAID else "refused"


def _changes_training(strategy: str) -> bool:
    """True if the strategy changes training, or is unknown here."""
    return strategy not in STRATEGIES.names or traits_of(strategy).changes_training


def _problem(folder: str, change: Change) -> Problem:
    before, now = apart(change.before, change.now)
    rule = f"was {shown(before)} when {folder} was saved"
    remedy = f"restore it, or add --accept-change {change.key} before the script"
    if change.key == "model":
        remedy = "resume with the model that was saved, or start a new run"
    return Problem(change.key, rule, remedy, shown(now))


def _no_such(key: str, terms: Terms) -> Problem:
    near = difflib.get_close_matches(key, terms, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"one of {', '.join(sorted(terms))}"
    return Problem(
        "--accept-change", "is not a setting that this run's results depend on", remedy, key
    )


def shown(value: Any) -> str:
    """Return a value as a message shows it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={each}" for key, each in value.items()) or "absent"
    return str(value).lower() if isinstance(value, bool) else str(value)
