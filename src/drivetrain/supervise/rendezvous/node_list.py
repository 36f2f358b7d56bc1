"""The list of nodes as text: JSON, checked when it is read back.

torch keeps it as a pickle, and reading a pickle runs whatever is in it; the folder it lies in is
one that others may be able to write.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from drivetrain.core.bounded import parse_json

_ADDRESS = re.compile(r"[A-Za-z0-9._:%\-\[\]]{1,255}")
"""Names and addresses of hosts: they become names of files, too."""


def to_json(state: _RendezvousState) -> bytes:
    """All of it."""
    deadline = state.deadline
    document = {
        "round": state.round,
        "complete": state.complete,
        "deadline": None if deadline is None else deadline.isoformat(),
        "closed": state.closed,
        "participants": [[_said(node), rank] for node, rank in state.participants.items()],
        "wait_list": [_said(node) for node in state.wait_list],
        "redundancy_list": [_said(node) for node in state.redundancy_list],
        "last_heartbeats": [
            [_said(node), sign.isoformat()] for node, sign in state.last_heartbeats.items()
        ],
    }
    return json.dumps(document).encode()


def from_json(data: bytes) -> _RendezvousState:
    """As it was written; ValueError when it was not written by `to_json`."""
    try:
        return _state(parse_json(data))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"lacks what it must have ({error})") from None


def _state(document: dict[str, Any]) -> _RendezvousState:
    state = _RendezvousState()
    deadline = document["deadline"]
    state.round = int(document["round"])
    state.complete = bool(document["complete"])
    state.deadline = None if deadline is None else _moment(deadline)
    state.closed = bool(document["closed"])
    state.participants = {_node(*node): int(rank) for node, rank in document["participants"]}
    state.wait_list = {_node(*node) for node in document["wait_list"]}
    state.redundancy_list = {_node(*node) for node in document["redundancy_list"]}
    state.last_heartbeats = {
        _node(*node): _moment(sign) for node, sign in document["last_heartbeats"]
    }
    return state


def _said(node: _NodeDesc) -> list[str | int]:
    return [node.addr, node.pid, node.local_id]


def _node(address: str, pid: int, local_id: int) -> _NodeDesc:
    if not _ADDRESS.fullmatch(address) or address.startswith("."):
        raise ValueError(f"{address!r} is no host's name")
    return _NodeDesc(address, int(pid), int(local_id))


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text} has no time zone")
    return moment
