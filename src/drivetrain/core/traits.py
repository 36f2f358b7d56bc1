"""Traits: what the rest of the code may know about a strategy without loading it.

They are in the lowest layer because `config` builds its keys and rules from them and must import
neither torch nor anything above it. Each strategy defines its own in
`strategies/<name>/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from drivetrain.core.errors import Problem
from drivetrain.core.plugins import Plugins
from drivetrain.core.section import Section

Feature = Literal["tp", "pp", "cp", "ep", "offload", "bitwise", "compression", "live"]
"""The axes that split a model; memory.offload; reproducibility: bitwise; communication.compression;
fault_tolerance: live."""
Shortage = Literal["memory", "bandwidth"]


@dataclass(frozen=True)
class Rule:
    """A check and the keys it reads; it is skipped if one of these keys is itself invalid."""

    reads: tuple[str, ...]
    check: Callable[[Any], Iterator[Problem]]
    """Takes a whole RunConfig."""


@dataclass(frozen=True)
class NamedLayout:
    """What a layout's name means: the axes of its sizes, and the settings it needs."""

    axes: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Launcher:
    """The engine's own launcher, under which the engine knows the ranks."""

    environment: str
    """`Identity.environment` under this launcher."""
    rendezvous: str
    """Reference of a function that takes the identity and returns torch's rendezvous store."""


@dataclass(frozen=True)
class Traits:
    """The description of one strategy."""

    name: str
    summary: str
    """Sentence fragment for the description of `parallel.strategy`."""
    section: type[Section]
    """Its config section: `parallel.<name>`."""
    strategy: str
    """Reference of `make(config, micro_batch_blocks) -> Strategy`; importing it may load torch."""
    cost: str
    """Reference of its CostModel, which does not import torch."""
    fills: Literal["dp_replicate", "dp_shard"] = "dp_replicate"
    """The axis that ranks are assigned to by default. dp_shard: the strategy shards."""
    combines_with: frozenset[Feature] = frozenset()
    rules: tuple[Rule, ...] = ()
    """Its own rules, checked only if it is the strategy."""
    keeps_copies_equal: bool = False
    """True if replicas are bit-for-bit equal after every step, so the sentinel may compare them."""
    changes_training: bool = False
    """True if its steps differ from a single device's: its settings then affect the results, and
    switching to or from it changes the training."""
    can_be_rehearsed: bool = False
    rehearse_within: str = ""
    """Reference of a context manager around a rehearsal."""
    is_proposed: bool = False
    """True if the planner considers it by default."""
    packages: tuple[str, ...] = ()
    """Packages it needs besides torch."""
    preload: tuple[str, ...] = ()
    """Modules that a warm process imports in advance."""
    launcher: Launcher | None = None
    backends: tuple[str, ...] = ()
    """Other tools' names for it, for `--backend`."""
    known_as: tuple[str, ...] = ()
    """Other names for its method, for hints; several strategies may share one."""
    layouts: Mapping[str, NamedLayout] = field(default_factory=dict)
    """Layout names for `drivetrain verify parity`."""
    helps_with: frozenset[Shortage] = frozenset()

    @property
    def shards(self) -> bool:
        """True if a rank keeps only a part of the weights, gradients or optimizer state."""
        return self.fills == "dp_shard"


STRATEGIES = Plugins("drivetrain.strategies", built_in="drivetrain.strategies:BUILT_IN")


def traits_of(name: str) -> Traits:
    """Return the traits of one strategy; its name must be registered."""
    found: Traits = STRATEGIES.load(name)
    return found


def all_traits() -> tuple[Traits, ...]:
    """Return the traits of every strategy, the default one first."""
    return tuple(traits_of(name) for name in STRATEGIES.names)


def known_as() -> dict[str, str]:
    """Map other tools' names to the strategies that do the same, for a message: `a or b`."""
    said = {word for each in all_traits() for word in each.known_as}
    return {
        word: " or ".join(each.name for each in all_traits() if word in each.known_as)
        for word in said
    }


def with_feature(feature: Feature) -> str:
    """Return the strategies that combine with a feature, for a message: `a or b`."""
    return " or ".join(each.name for each in all_traits() if feature in each.combines_with)


def remedy_for(shortage: Shortage) -> str:
    """Return the strategies that help, as command-line arguments."""
    names = [each.name for each in all_traits() if shortage in each.helps_with]
    return " or ".join(f"parallel.strategy={name}" for name in names)
