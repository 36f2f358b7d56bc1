"""Layouts as written on the command line: `ddp:2,hsdp:2x2,parallel.strategy=fsdp@4`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.traits import NamedLayout, all_traits

# One line per name; `name:2` or, with several axes, `name:2x4` in this order.
_OF_AXES: Mapping[str, NamedLayout] = {
    "tp": NamedLayout(("tp",)),
    "tp+sp": NamedLayout(("tp",), {"parallel.tensor.sequence_parallel": "true"}),
    "tp+loss": NamedLayout(("tp",), {"parallel.tensor.loss_parallel": "true"}),
    "pp": NamedLayout(("pp",)),
    "tp+pp": NamedLayout(("tp", "pp")),
}
NAMES = {**{name: at for each in all_traits() for name, at in each.layouts.items()}, **_OF_AXES}


@dataclass(frozen=True)
class AskedLayout:
    """One layout to certify."""

    name: str
    """As written on the command line."""
    num_ranks: int
    overrides: tuple[str, ...] = ()
    """`path.to.key=value` for the script."""

    @property
    def divides_the_model(self) -> bool:
        """Whether ranks share layers, sequences or the model's depth."""
        axes = ("parallel.tp=", "parallel.pp=", "parallel.cp=")
        return any(override.startswith(axes) for override in self.overrides)

    @property
    def has_bitwise_mode(self) -> bool:
        """Whether the same layout can be run with reproducibility=bitwise, and is not."""
        says = set(self.overrides)
        return "parallel.strategy=ddp" in says and "reproducibility=bitwise" not in says

    @property
    def num_shares(self) -> int:
        """Into how many parts its ranks divide a batch."""
        axes = ("parallel.tp", "parallel.pp", "parallel.cp")
        settings = [override.partition("=") for override in self.overrides]
        sizes = [int(value) for key, _, value in settings if key in axes and value.isdigit()]
        return max(1, self.num_ranks // max(1, math.prod(sizes)))

    @property
    def names_all_axes(self) -> bool:
        """Whether it is a name, which replaces the script's own layout, and not settings of it."""
        return "=" not in self.name


UNDIVIDED = (
    *(f"parallel.{axis}=auto" for axis in ("dp_replicate", "dp_shard")),
    *(f"parallel.{axis}=1" for axis in ("tp", "pp", "cp", "ep")),
)
"""What a named layout says of the axes that it does not name."""
ONE_PROCESS = AskedLayout("1 process", 1)


def parse_layouts(text: str) -> list[AskedLayout]:
    """The layouts of a comma-separated list; ConfigError lists every problem."""
    layouts: list[AskedLayout] = []
    problems: list[Problem] = []
    settings: list[str] = []
    for word in filter(None, (piece.strip() for piece in text.split(","))):
        if "=" not in word and not settings:
            found = _named(word)
        elif "@" in word:
            found = _spelled_out([*settings, word])
            settings = []
        else:  # `a=1,b=2@4`: the comma was inside a layout
            settings.append(word)
            continue
        if isinstance(found, Problem):
            problems.append(found)
        else:
            layouts.append(found)
    if settings:
        problems.append(
            _problem(",".join(settings), "has no number of ranks", "end it with @RANKS")
        )
    if not layouts and not problems:
        problems.append(_problem(text, "names no layout", "for example ddp:2,fsdp:2"))
    if problems:
        raise ConfigError(problems)
    return layouts


def _named(word: str) -> AskedLayout | Problem:
    name, _, written = word.partition(":")
    if name not in NAMES:
        remedy = f"use one of {', '.join(NAMES)}, or key=value@RANKS"
        return _problem(word, "is not a layout", _meant(word) or remedy)
    axes = NAMES[name].axes
    sizes = [int(size) if size.isdigit() else 0 for size in written.split("x")]
    if len(sizes) == 1 and len(axes) == 2 and sizes[0] % 2 == 0:
        sizes = [2, sizes[0] // 2]
    if min(sizes) < 1 or len(sizes) != len(axes):
        example = ":".join((name, "x".join("2" for _ in axes)))
        return _problem(word, f"needs a size for {' and '.join(axes)}", f"for example {example}")
    along = [f"parallel.{axis}={size}" for axis, size in zip(axes, sizes, strict=True)]
    fixed = [f"{key}={value}" for key, value in NAMES[name].settings.items()]
    return AskedLayout(word, math.prod(sizes), (*fixed, *along))


def _meant(word: str) -> str | None:
    """`ddp2` → `ddp:2`."""
    for known in sorted(NAMES, key=len, reverse=True):
        sizes = word.removeprefix(known).lstrip("=@")
        if word.startswith(known) and re.fullmatch(r"\d+(x\d+)*", sizes):
            return f"did you mean {known}:{sizes}?"
    return None


def _spelled_out(words: Sequence[str]) -> AskedLayout | Problem:
    last, _, ranks = words[-1].rpartition("@")
    written = ",".join(words)
    if not ranks.isdigit() or int(ranks) < 1:
        return _problem(written, "has no number of ranks", "end it with @RANKS")
    return AskedLayout(written, int(ranks), (*words[:-1], last))


def _problem(value: str, rule: str, remedy: str) -> Problem:
    return Problem("--layouts", rule, remedy, value)
