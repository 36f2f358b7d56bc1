"""Traits: what the rest of the code may know of a strategy without loading it.

Here, at the bottom, because `config` builds its keys and rules from them and must import neither
torch nor anything above it. Each strategy states its own in `strategies/<name>/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from drivetrain.core.errors import Problem
from drivetrain.core.plugins import Plugins
from drivetrain.core.section import Section

Feature = Literal["tp", "pp", "cp", "ep", "offload", "bitwise", "compression", "live"]
"""The axes that cut a model; memory.offload; reproducibility: bitwise; communication.compression;
fault_tolerance: live."""
Shortage = Literal["memory", "bandwidth"]


@dataclass(frozen=True)
class Rule:
    """A check and the keys it reads: it is skipped while one of those is itself wrong."""

    reads: tuple[str, ...]
    check: Callable[[Any], Iterator[Problem]]
    """Of a whole RunConfig."""


@dataclass(frozen=True)
class NamedLayout:
    """What a layout's name stands for: the axes its sizes are for, and what else must be set."""

    axes: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Launcher:
    """A launcher of the engine's own, under which it is the engine that knows the ranks."""

    environment: str
    """`Identity.environment` there."""
    rendezvous: str
    """Reference of a function from the identity to the store that torch's ranks meet at."""


@dataclass(frozen=True)
class Traits:
    """One strategy, described."""

    name: str
    summary: str
    """Half a sentence, for `parallel.strategy`."""
    section: type[Section]
    """Its settings: `parallel.<name>`."""
    strategy: str
    """Reference of `make(config, micro_batch_blocks) -> Strategy`; importing it may load torch."""
    cost: str
    """Reference of its CostModel, which loads no torch."""
    fills: Literal["dp_replicate", "dp_shard"] = "dp_replicate"
    """The axis that ranks are put along when nothing is said; dp_shard: it keeps shards."""
    combines_with: frozenset[Feature] = frozenset()
    rules: tuple[Rule, ...] = ()
    """Of its own; asked only where it is the strategy."""
    keeps_copies_equal: bool = False
    """After every step, to the last bit: the sentinel may compare them."""
    changes_training: bool = False
    """Whether steps are other ones than a single device's: then its settings decide the numbers,
    and changing to it or from it is another training."""
    can_be_rehearsed: bool = False
    rehearse_within: str = ""
    """Reference of a context manager around a rehearsal."""
    is_proposed: bool = False
    """Whether the planner looks at it unasked."""
    packages: tuple[str, ...] = ()
    """What must be installed beside torch."""
    preload: tuple[str, ...] = ()
    """Modules that a warm process imports ahead."""
    launcher: Launcher | None = None
    backends: tuple[str, ...] = ()
    """What other tools call it, for `--backend`."""
    known_as: tuple[str, ...] = ()
    """Other names for what it does, for hints; several strategies may share one."""
    layouts: Mapping[str, NamedLayout] = field(default_factory=dict)
    """Names for `drivetrain verify parity`."""
    helps_with: frozenset[Shortage] = frozenset()

    @property
    def shards(self) -> bool:
        """Whether a rank keeps a part of the weights, gradients or optimizer state only."""
        return self.fills == "dp_shard"


STRATEGIES = Plugins("drivetrain.strategies", built_in="drivetrain.strategies:BUILT_IN")


def traits_of(name: str) -> Traits:
    """Of one strategy; its name must be registered."""
    found: Traits = STRATEGIES.load(name)
    return found


def all_traits() -> tuple[Traits, ...]:
    """Of every strategy there is, the default one first."""
    return tuple(traits_of(name) for name in STRATEGIES.names)


def known_as() -> dict[str, str]:
    """By what other tools say: the strategies that do it, for a message: `a or b`."""
    said = {word for each in all_traits() for word in each.known_as}
    return {
        word: " or ".join(each.name for each in all_traits() if word in each.known_as)
        for word in said
    }


def with_feature(feature: Feature) -> str:
    """The strategies that combine with it, for a message: `a or b`."""
    return " or ".join(each.name for each in all_traits() if feature in each.combines_with)


def remedy_for(shortage: Shortage) -> str:
    """Which strategy helps, as words of a command line."""
    names = [each.name for each in all_traits() if shortage in each.helps_with]
    return " or ".join(f"parallel.strategy={name}" for name in names)
