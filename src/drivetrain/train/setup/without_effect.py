"""Config keys that have no effect because of what the script brings: refused or announced?"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from drivetrain.config.keys import flatten
from drivetrain.config.provenance import Source, SourceKind
from drivetrain.config.schema import Data, Optimization
from drivetrain.record.run_directory import config_so_far
from drivetrain.record.session import earlier_directory


def is_refused(
    path: str,
    value: Any,
    source: Source,
    before: Mapping[str, Any],
    refused: Collection[SourceKind] = ("command line", "file"),
) -> bool:
    """Whether a key without effect is refused: the user set it at one of the places in `refused`.

    It is not where a file or the script repeats the default, and not in a run that began with this
    value: that run must remain resumable.
    """
    is_known = path in before and before[path] == value
    return source.kind in refused and not repeats_default(path, value, source) and not is_known


def repeats_default(path: str, value: Any, source: Source) -> bool:
    """Whether a default is only written out; on the command line, it was typed for an effect."""
    sections = {"optimization": Optimization(), "data": Data()}
    defaults = flatten({name: each.model_dump(mode="json") for name, each in sections.items()})
    return source.kind != "command line" and value == defaults[path]


def values_so_far() -> dict[str, Any]:
    """Return the config with which the resumed run began, by dotted key; empty for a new run."""
    return flatten(config_so_far(earlier_directory()))
