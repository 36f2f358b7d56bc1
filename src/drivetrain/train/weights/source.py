"""From the user's function to a model whose weights come later, or are there already."""

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
from drivetrain.data.seeding import seed_data, seed_model
from drivetrain.parallel.world import World
from drivetrain.train.contract import agree_on_model, agree_on_tensors
from drivetrain.train.weights.placing import Weights, place
from drivetrain.train.weights.pretrained import pretrained
from drivetrain.train.weights.recording import Part, RecordedWeights, Recording, without_values

_Made = TypeVar("_Made")
_MUCH = 2**30
"""Bytes that ranks hold beside their shards while they start, from which on it is said."""


@dataclass
class NewModel:
    """A model as the user's function makes it; on the meta device if its weights come later."""

    model: nn.Module
    weights: Weights | None = None
    notes: list[str] = field(default_factory=list)
    fingerprint: str | None = None
    """Of the files that weights are read from."""
    unread: ConfigError | None = None
    """Why files could not be read, where a checkpoint is expected to have the weights."""

    def fill(self, shards_on: torch.device, device: torch.device) -> None:
        """Weights that come later come now: of what this rank holds. A collective call."""
        if self.weights is not None:
            place(self.model, self.weights, shards_on, device)
            self.weights = None  # what it was made from is not needed any more


def whole_model(make: Callable[[], nn.Module], world: World, config: RunConfig) -> NewModel:
    """Made at once, under the run's seed."""
    return NewModel(_seeded(make, world, config))


def agreed(new: NewModel, world: World) -> NewModel:
    """Every rank has made the same model, or takes the weights of rank 0. Collective."""
    if new.weights is None:
        new.notes += agree_on_model(new.model, world)
    else:
        agree_on_tensors(new.model, world)
    return new


def with_pretrained(new: NewModel, said: Model, world: World, *, is_resumed: bool) -> NewModel:
    """Weights that files have come from there. A collective call.

    A run that goes on from a checkpoint can do without them: whoever finds none raises `unread`.
    """
    if said.pretrained is None:
        return new
    if new.weights is None:
        rule = "the model is made already, or differs between ranks"
        remedy = "pass a function that makes it, the same on every rank"
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
    """Recorded while it is made, so that each rank makes its parts alone. A collective call.

    A model that cannot be recorded is made whole by each rank of a node in turn, twice: once for
    its shape, once for its weights. Where ranks have recorded different things (weights that only
    rank 0 has read), each makes its own, and `agreed` settles it.
    """
    stream = fold(config.seed, INIT)
    keyed = config.model.initialization == "keyed"
    recording = Recording(partial(fold, stream) if keyed else None)
    recording.when_long = _say_it_takes_long if world.is_main else None
    made: tuple[nn.Module, RecordedWeights] | None = None
    why = ""
    try:
        made = _seeded(lambda: recording.build(make), world, config)
    except Exception as error:  # of the user's own: made whole, it comes up again
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
        "each rank draws all of the model's first weights, one tensor after the other, and has "
        "done so for a minute; model.initialization=keyed draws only what a rank holds a part of, "
        "and gives other weights",
        stacklevel=2,
    )


def _seeded(make: Callable[[], _Made], world: World, config: RunConfig) -> _Made:
    seed = fold(config.seed, INIT)
    seed_data(seed)
    seed_model(seed, world.device)
    return make()


def _of_given(weights: RecordedWeights) -> list[str]:
    size = sum(tensor.nbytes for tensor in weights.given.values())
    if size < _MUCH:
        return []
    return [
        f"model: {readable_bytes(size)} of weights were read while it was made; each rank holds "
        "them whole until it has its shards; model.pretrained reads a rank's shards only"
    ]


def _in_turns(make: Callable[[], nn.Module], world: World, config: RunConfig, why: str) -> NewModel:
    with _turn(world):
        model = _seeded(make, world, config)
        without_values(model, lambda *_: None)
    note = (
        f"model: cannot be made shard by shard ({why}); the ranks of a node make it whole, one "
        "after the other"
    )
    if config.model.initialization == "keyed":
        note += ", with weights as model.initialization=sequential has them"
    return NewModel(model, _WholeInTurn(partial(_seeded, make, world, config), world), [note])


class _WholeInTurn:
    """One whole model in a node's memory at a time."""

    def __init__(self, make: Callable[[], nn.Module], world: World) -> None:
        self._make, self._world = make, world

    @contextmanager
    def opened(self) -> Iterator[Part]:
        """While it is open, the node's other ranks wait."""
        with _turn(self._world):
            model = self._make()
            tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
            tensors |= dict(model.named_buffers(remove_duplicate=False))
            yield lambda name, box: tensors[name][box]


@contextmanager
def _turn(world: World) -> Iterator[None]:
    """One rank of each node at a time."""
    for turn in range(world.identity.local_world_size):
        if turn == world.identity.local_rank:
            yield
        world.sum_floats([0.0])
