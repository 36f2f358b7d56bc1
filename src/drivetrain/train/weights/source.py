"""Build a model with the user's function, with its weights or with weights set later."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from drivetrain.config.schema import Model, RunConfig
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.text import readable_bytes
from drivetrain.data.keys import INIT, fold
from drivetrain.data.seeding import seed_model
from drivetrain.parallel.world import World
from drivetrain.train.contract import agree_on_model, agree_on_tensors
from drivetrain.train.weights.placing import Weights, place
from drivetrain.train.weights.pretrained import pretrained
from drivetrain.train.weights.recording import Part, RecordedWeights, Recording, without_values

_Made = TypeVar("_Made")
_MUCH = 2**30
"""From this many bytes of whole weights per rank at start-up, a note is shown."""


@dataclass
class NewModel:
    """A model built by the user's function; on the meta device if its weights are set later."""

    model: nn.Module
    weights: Weights | None = None
    notes: list[str] = field(default_factory=list)
    fingerprint: str | None = None
    """Fingerprint of the files that weights are read from."""
    unread: ConfigError | None = None
    """Error from reading the files, kept while a checkpoint may have the weights."""

    def fill(self, shards_on: torch.device, device: torch.device) -> None:
        """Set the weights that this rank holds, if they are not set yet. A collective call."""
        if self.weights is not None:
            place(self.model, self.weights, shards_on, device)
            self.weights = None  # the source is no longer needed


def whole_model(make: Callable[[], nn.Module], world: World, config: RunConfig) -> NewModel:
    """Build the model with its weights, under the run's seed."""
    return NewModel(_seeded(make, world, config))


def agreed(new: NewModel, world: World) -> NewModel:
    """Let every rank have the same model, with rank 0's weights if they differ. Collective."""
    if new.weights is None:
        new.notes += agree_on_model(new.model, world)
    else:
        agree_on_tensors(new.model, world)
    return new


def with_pretrained(new: NewModel, said: Model, world: World, *, is_resumed: bool) -> NewModel:
    """Use the weights from files, as far as they have them. A collective call.

    A run that resumes from a checkpoint does not need the files; if there turns out to be no
    checkpoint, `unread` is raised.
    """
    if said.pretrained is None:
        return new
    if new.weights is None:
        rule = "the model is already built, or differs between ranks"
        remedy = "pass a function that builds it, the same on every rank"
        raise ConfigError([Problem("model.pretrained", rule, remedy, said.pretrained)])
    try:
        new.weights, note, new.fingerprint = pretrained(new.model, new.weights, said, world)
    except ConfigError as error:
        if not is_resumed:
            raise
        new.unread = error
        note = f"{error}: needed only if there is no checkpoint"
    new.notes.append(note)
    return new


def later_model(make: Callable[[], nn.Module], world: World, config: RunConfig) -> NewModel:
    """Record the model's construction, so that each rank can create its parts. Collective.

    A model that cannot be recorded is built whole by each rank of a node in turn, twice: once for
    its shape, once for its weights. If the recordings of ranks differ (weights that only rank 0 has
    read), each rank builds the model with its weights, and `agreed` shares rank 0's.
    """
    stream = fold(config.seed, INIT)
    keyed = config.model.initialization == "keyed"
    recording = Recording(partial(fold, stream) if keyed else None)
    recording.when_long = _say_it_takes_long if world.is_main else None
    made: tuple[nn.Module, RecordedWeights] | None = None
    why = ""
    try:
        made = _seeded(lambda: recording.build(make), world, config)
    except Exception as error:  # the user's own error comes up again when built whole
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    unable = world.first_with(made is None)
    if unable is not None or made is None:
        return _in_turns(make, world, config, world.agree(why, speaker=unable or 0))
    model, weights = made
    if world.first_with(world.agree(weights.digest) != weights.digest) is not None:
        return whole_model(make, world, config)
    return NewModel(model, weights, _of_given(weights))


def _say_it_takes_long() -> None:
    warnings.warn(
        "each rank draws all of the model's initial weights, tensor by tensor, and has done so "
        "for a minute; model.initialization=keyed draws only the tensors that a rank holds a part "
        "of, but gives different weights",
        stacklevel=2,
    )


def _seeded(make: Callable[[], _Made], world: World, config: RunConfig) -> _Made:
    seed_model(fold(config.seed, INIT), world.device)
    return make()


def _of_given(weights: RecordedWeights) -> list[str]:
    size = sum(tensor.nbytes for tensor in weights.given.values())
    if size < _MUCH:
        return []
    return [
        f"model: {readable_bytes(size)} of weights were read while it was built; each rank holds "
        "all of them until it has its shards; model.pretrained reads only a rank's shards"
    ]


def _in_turns(make: Callable[[], nn.Module], world: World, config: RunConfig, why: str) -> NewModel:
    with _turn(world):
        model = _seeded(make, world, config)
        without_values(model, lambda *_: None)
    note = (
        f"model: cannot be built shard by shard ({why}); the ranks of a node build all of it, one "
        "after the other"
    )
    if config.model.initialization == "keyed":
        note += ", with the weights of model.initialization=sequential"
    return NewModel(model, _WholeInTurn(partial(_seeded, make, world, config), world), [note])


class _WholeInTurn:
    """Weights from a whole model, of which only one at a time is in a node's memory."""

    def __init__(self, make: Callable[[], nn.Module], world: World) -> None:
        self._make, self._world = make, world

    @contextmanager
    def opened(self) -> Iterator[Part]:
        """Context with a function that returns a part of a tensor; the node's other ranks wait."""
        with _turn(self._world):
            model = self._make()
            tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
            tensors |= dict(model.named_buffers(remove_duplicate=False))
            yield lambda name, box: tensors[name][box]


@contextmanager
def _turn(world: World) -> Iterator[None]:
    """Context that one rank of each node at a time is in."""
    for turn in range(world.identity.local_world_size):
        if turn == world.identity.local_rank:
            yield
        world.sum_floats([0.0])
