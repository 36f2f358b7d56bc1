"""Mailbox: exchanges small real tensors between the rehearsed ranks.

Most collectives of a rehearsal carry fake tensors, of which only the shape is known. A few carry
values that affect what happens next: the shape a stage passes on, or whether losses count tokens.
Those are exchanged through a store. A rank that is not rehearsed is represented by the most similar
one, with the values of that rank's exchange along the same axes.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from drivetrain.checkpoint.weight_files import raw_bytes
from drivetrain.core.bounded import parse_json
from drivetrain.parallel.layout import Layout
from drivetrain.rehearse.calls import RehearsedCall
from drivetrain.rehearse.world import axes_of, speaker_for

# A message from one rehearsed rank to another: its current collective, and small tensors.

Shape = tuple[str, int, str]


def written_letter(call: RehearsedCall, values: Sequence[torch.Tensor]) -> str:
    """Return a message as text for the store."""
    return json.dumps({"shape": call.shape, "values": [_tensor_out(value) for value in values]})


def read_letter(text: bytes) -> tuple[Shape, list[torch.Tensor]]:
    """Return the sender's call (`RehearsedCall.shape`) and values; ValueError if invalid."""
    try:
        document = parse_json(text)
        name, num_bytes, dtype = document["shape"]
        values = [_tensor_in(value) for value in document["values"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a valid message: {error}") from None
    return (str(name), int(num_bytes), str(dtype)), values


def _tensor_out(tensor: torch.Tensor) -> dict[str, Any]:
    data = base64.b64encode(raw_bytes(tensor)).decode()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(tensor.shape), "data": data}


def _tensor_in(value: dict[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, value["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{value['dtype']} is not a dtype")
    shape, data = [int(size) for size in value["shape"]], base64.b64decode(value["data"])
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError("a tensor's bytes do not fit its shape")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


class NotTogether(Exception):
    """A rank of the group makes a different call, or none."""


class Mailbox:
    """One rank's mailbox; all rehearsed ranks of a group must make the same exchange."""

    def __init__(
        self, store: Store, rank: int, rehearsed: Sequence[int], layout: Layout, timeout_s: float
    ) -> None:
        self._store = store
        self._rank = rank
        self._rehearsed = frozenset(rehearsed)
        self._layout = layout
        self._timeout = timedelta(seconds=timeout_s)
        self._turns: Counter[str] = Counter()
        self._speakers: dict[int, int] = {each: each for each in rehearsed}

    def exchange(
        self, call: RehearsedCall, values: Sequence[torch.Tensor]
    ) -> list[list[torch.Tensor]]:
        """Return the values of each rank of the group, in the group's order."""
        along = f"{axes_of(call.ranks, self._layout)}/{len(call.ranks)}"
        self._turns[along] += 1
        turn = f"{along}/{self._turns[along]}"
        self._store.set(f"{turn}/{self._rank}", written_letter(call, values))
        speakers = [self._speaker(rank) for rank in call.ranks]
        letters = {rank: self._read(turn, rank, call) for rank in dict.fromkeys(speakers)}
        return [letters[rank] for rank in speakers]

    def _speaker(self, rank: int) -> int:
        if rank not in self._speakers:
            self._speakers[rank] = speaker_for(rank, self._rehearsed, self._layout)
        return self._speakers[rank]

    def send(self, call: RehearsedCall, values: Sequence[torch.Tensor]) -> None:
        """Send values to another rank, which may read them later."""
        key = f"{self._next(self._rank, call.peer)}/{self._rank}"
        self._store.set(key, written_letter(call, values))

    def receive(self, call: RehearsedCall) -> list[torch.Tensor] | None:
        """Receive values from another rank; None if it is not rehearsed."""
        if call.peer is None or call.peer not in self._rehearsed:
            return None
        pair = self._next(call.peer, self._rank)
        return self._read(pair, call.peer, replace(call, name="send"))

    def _next(self, sender: int | None, receiver: int | None) -> str:
        pair = f"{sender}-{receiver}"
        self._turns[pair] += 1
        return f"{pair}/{self._turns[pair]}"

    def _read(self, group: str, rank: int, call: RehearsedCall) -> list[torch.Tensor]:
        key = f"{group}/{rank}"
        try:
            self._store.wait([key], self._timeout)
        except Exception as error:
            raise NotTogether(f"rank {rank} never called {call.name}") from error
        try:
            shape, values = read_letter(self._store.get(key))
        except ValueError as error:
            raise NotTogether(f"the message from rank {rank} cannot be read ({error})") from None
        if shape != call.shape:
            raise NotTogether(f"rank {rank} called {shape[0]}, not {call.name}")
        return values
