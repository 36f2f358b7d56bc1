"""Nothing that another can write is unpickled; where objects travel, each has its reason."""

from __future__ import annotations

import base64
import os
import pickle
import re
import struct
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from drivetrain.core.errors import DamagedRun
from drivetrain.parallel.layout import Layout
from drivetrain.rehearse.calls import RehearsedCall
from drivetrain.rehearse.mailbox import Mailbox, NotTogether
from drivetrain.supervise.rendezvous.folder import Head, RendezvousFolder, nodes_from_json

SOURCE = Path(__file__).parents[2] / "src" / "drivetrain"
RISKY = {
    "pickle": r"\bpickle\.(?:loads?|Unpickler)\b|\bcopyreg\.",
    "marshal": r"\b(?:marshal|shelve|dill|cloudpickle|joblib)\.",
    "torch.load": r"\btorch\.load\((?!.*weights_only=True)",
    "yaml": r"\byaml\.(?:load|load_all|unsafe_load|full_load)\(",
    "eval": r"(?<![.\w])(?:eval|exec)\(",
    "numpy": r"allow_pickle\s*=\s*True",
    "objects": r"\b(?:broadcast_object_list|(?:all_)?gather_object|scatter_object_list"
    r"|(?:send|recv)_object_list)\(",
}
RANKS = "between the ranks of one process group, which has no reader outside it"
ALLOWED = {
    ("supervise/failures/dump_responder.py", "pickle"): "torch's own dump, out of this process",
    (
        "rehearse/fake_tensor_dispatch.py",
        "pickle",
    ): "how a fake tensor is written; nothing is read by it",
    ("cluster/file.py", "yaml"): "a SafeLoader that refuses a key that is set twice",
    ("core/bounded.py", "yaml"): "a SafeLoader, after its size was counted",
    ("launch/request.py", "yaml"): "BaseLoader, which makes strings only; the user's own file",
    ("learn/checks/zero3.py", "objects"): RANKS,
    ("parallel/world.py", "objects"): RANKS,
    ("parallel/pipeline/pipelined.py", "objects"): RANKS,
    ("strategies/horovod/rendezvous.py", "objects"): RANKS,
    ("strategies/parameter_server/strategy.py", "objects"): RANKS,
    ("train/evaluate.py", "objects"): RANKS,
    ("train/outputs.py", "objects"): RANKS,
    ("checkpoint/checkpointer.py", "objects"): RANKS,
}


def test_every_place_where_objects_are_read_back_was_looked_at() -> None:
    found: Counter[tuple[str, str]] = Counter()
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        for kind, pattern in RISKY.items():
            found[str(path.relative_to(SOURCE)), kind] += len(re.findall(pattern, text))
    places = {place for place, count in found.items() if count}
    assert places - set(ALLOWED) == set(), "look at it, and say here why it is safe"
    assert set(ALLOWED) - places == set(), "gone: take the line out"


class _Runs:
    """Unpickled, it leaves a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.trace),)


def test_a_list_of_nodes_that_is_a_pickle_is_refused(tmp_path: Path) -> None:
    folder = RendezvousFolder(tmp_path / "meeting")
    payload = struct.pack("<QQ", 1, 1) + pickle.dumps(_Runs(tmp_path / "ran"))
    (tmp_path / "meeting" / "state").write_bytes(payload)
    with pytest.raises(DamagedRun, match="not a list of nodes; remove"):
        folder.read()
    assert not (tmp_path / "ran").exists()


_LIST = (
    '{"round": 1, "complete": true, "deadline": null, "closed": false, "participants": [%s],'
    ' "ranks": [%s], "wait_list": [], "redundancy_list": [], "unlisted": []}'
)


def test_a_list_of_nodes_may_hold_one() -> None:
    """What the wrong ones below are made of is right."""
    state = nodes_from_json((_LIST % ('["host", 1, 2, null]', 0)).encode())
    assert state.participants == {_NodeDesc("host", 1, 2): 0}


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"round": "x"}',
        "[" * 100_000,
        _LIST % ('["../../x", 1, 2, null]', 0),
        _LIST % ('["host", 1, 2, null]', "0, 1"),
        _LIST % ('["host", 1, 2, "2026-01-01T00:00:00"]', 0),
    ],
)
def test_a_list_of_nodes_that_is_wrong_is_refused(tmp_path: Path, text: str) -> None:
    folder = RendezvousFolder(tmp_path / "meeting")
    (tmp_path / "meeting" / "state").write_bytes(struct.pack("<QQ", 1, 1) + text.encode())
    with pytest.raises(DamagedRun, match="not a list of nodes"):
        folder.read()


def test_a_list_of_nodes_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = RendezvousFolder(tmp_path / "meeting")
    state = _RendezvousState()
    nodes = [_NodeDesc(f"host-{n}.example", 10 + n, n) for n in range(3)]
    state.round, state.complete, state.deadline = 3, True, datetime.now(UTC)
    state.participants = {nodes[1]: 0, nodes[0]: 1}
    state.wait_list, state.redundancy_list = {nodes[2]}, {nodes[2]}
    state.last_heartbeats = {node: datetime.now(UTC) for node in nodes}
    folder.write(state, Head(7, 2))
    found = folder.read()
    assert found is not None
    assert vars(found[0]) == vars(state)
    assert list(found[0].participants) == list(state.participants)
    assert found[1] == Head(7, 2)


CALL = RehearsedCall("broadcast", 8, "int64", (0, 1))


def _mailboxes() -> tuple[Any, Mailbox, Mailbox]:
    store = HashStore()
    layout = Layout(dp_replicate=2)
    here, there = (Mailbox(store, rank, (0, 1), layout, 2.0) for rank in range(2))
    return store, here, there


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3),
        torch.tensor(True),
        torch.empty(0, 4),
        torch.randn(3).bfloat16(),
        torch.tensor([1, 2], dtype=torch.uint8),
    ],
)
def test_a_letter_arrives_as_it_was_sent(tensor: torch.Tensor) -> None:
    _, here, there = _mailboxes()
    send = RehearsedCall("send", 8, "int64", (0, 1), peer=1)
    here.send(send, [tensor])
    (got,) = there.receive(RehearsedCall("recv", 8, "int64", (0, 1), peer=0)) or []
    assert got.dtype == tensor.dtype
    assert torch.equal(got, tensor)


def test_a_letter_that_is_a_pickle_is_refused(tmp_path: Path) -> None:
    store, _, there = _mailboxes()
    payload = pickle.dumps(_Runs(tmp_path / "ran"))
    for form in (payload.hex(), base64.b64encode(payload).decode(), payload.decode("latin-1")):
        store.set("0-1/1/0", form)
        _, _, there = store, None, Mailbox(store, 1, (0, 1), Layout(dp_replicate=2), 2.0)
        with pytest.raises(NotTogether, match="cannot be read"):
            there.receive(RehearsedCall("recv", 8, "int64", (0, 1), peer=0))
    assert not (tmp_path / "ran").exists()
