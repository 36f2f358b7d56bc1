"""Files as nobody wrote them, and everything that reads them. An error of ours is a good answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from rich.console import Console

from drivetrain.checkpoint import catalogue
from drivetrain.checkpoint.index_check import read_index
from drivetrain.checkpoint.manifest import DamagedCheckpoint, Manifest, fingerprint
from drivetrain.checkpoint.storage import LocalStorage
from drivetrain.cli.reading import reading
from drivetrain.config import load_config
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.text import plain_but_coloured
from drivetrain.diagnose.run import diagnose
from drivetrain.launch import submission
from drivetrain.launch.targets.hosts import read_hosts
from drivetrain.record import RunDirectory
from drivetrain.record.reading import open_run
from drivetrain.record.status import status_of
from drivetrain.supervise.rendezvous.folder import nodes_from_json
from drivetrain.view.compare import compare_runs
from drivetrain.view.describe import view_whole
from drivetrain.view.follow import RunFollower
from drivetrain.view.page import compare_page, report_page
from drivetrain.view.terminal.screen import show_comparison, watch_once
from tests.fuzz.watch import harmless
from tests.security.damage import READ, small_run

NUMBERS = st.integers() | st.floats() | st.sampled_from([-1, 0, 2**31, 2**64, 10**30, 1e300])
WORDS = st.text(max_size=20) | st.sampled_from(["../../x", "/dev/zero", "\x1b[2J", "null", "-o"])
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)
KEYS = ["config", "record", "max_steps", "kind", "time_s", "step", "failures", "values", "fields"]
KEYS += ["started_s", "world_size", "name", "target", "job", "id", "members", "exit_code", "files"]


@st.composite
def changed(draw: st.DrawFn, good: bytes) -> bytes:
    """A good file with something else in it, or something else altogether."""
    how = draw(st.sampled_from(["bytes", "value", "flip", "cut", "twice", "key"]))
    if how == "bytes":
        return draw(st.binary(max_size=600))
    if how == "value":
        return json.dumps(draw(VALUES)).encode()
    if how == "cut":
        return good[: draw(st.integers(0, len(good)))]
    if how == "twice":
        return good + good
    if how == "flip" and good:
        data = bytearray(good)
        for _ in range(draw(st.integers(1, 4))):
            data[draw(st.integers(0, len(good) - 1))] = draw(st.integers(0, 255))
        return bytes(data)
    return _with_value(good, draw(st.sampled_from(KEYS)), draw(VALUES))


def _with_value(good: bytes, key: str, value: Any) -> bytes:
    """One of a document's values, or of an event's or a header's, is another."""
    lines = good.split(b"\n", 1)
    for whole, rest in ((good, b""), (lines[0], b"\n" + (lines[1:] or [b""])[0])):
        try:
            document = json.loads(whole)
        except ValueError:
            continue
        if isinstance(document, dict):
            known = [*document, key]
            document[known[len(repr(value)) % len(known)]] = value
            return json.dumps(document).encode().ljust(len(whole)) + rest
    return json.dumps({key: value}).encode()


@cache
def _template(root: Path) -> Path:
    return small_run(root / "good")


def read_run(root: Path, name: str, data: bytes, shown_by: str) -> None:
    """One file of a run's directory is other than it was; everything reads it, one verb shows it.

    `shown_by`: of SHOWN.
    """
    good, run = _template(root), root / "run"
    if not run.exists():
        shutil.copytree(good, run)
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    try:
        with harmless():
            for read in (_status, _diagnose, _job, _ls, _goes_on, SHOWN[shown_by]):
                _ours(lambda read=read: read(run))  # type: ignore[misc]
    finally:
        shutil.copy(good / name, path) if (good / name).exists() else path.unlink()


def _ours(read: Callable[[], Any]) -> None:
    try:
        read()
    except (DrivetrainError, DamagedCheckpoint):
        return


def _status(run: Path) -> None:
    with reading(str(run)):
        status_of(open_run(run), 2000.0)


def _diagnose(run: Path) -> None:
    with reading(str(run)):
        diagnose(run)


def _job(run: Path) -> None:
    found = submission.find(run)
    if found is not None:
        found.status()


def _ls(run: Path) -> None:
    storage = LocalStorage(run / "checkpoints")
    with reading(str(run)):
        for entry in catalogue.entries(storage):
            _ours(lambda entry=entry: catalogue.verify(storage, entry.folder))  # type: ignore[misc]


def _report(run: Path) -> None:
    with reading(str(run)):
        report_page(view_whole(open_run(run), 2000.0, diagnose(run)), 2000.0)


def _compare(run: Path) -> None:
    good = run.parent / "good"
    with reading(str(run)):
        for pair in ((run, good), (good, run)):
            found = compare_runs(*(view_whole(open_run(each), 2000.0) for each in pair))
            show_comparison(found, Console(file=StringIO(), markup=False))
            compare_page(found, 2000.0)


def _watch(run: Path) -> None:
    with reading(str(run)):
        watch_once(RunFollower(open_run(run)), Console(file=StringIO()))


def _logs(run: Path) -> None:
    with reading(str(run)):
        for piece in islice(submission.load(str(run)).logs(follow=False), 100):
            plain_but_coloured(piece)


SHOWN: dict[str, Callable[[Path], None]] = {
    "report": _report,
    "compare": _compare,
    "watch": _watch,
    "logs": _logs,
}
"""What draws a picture of a run: slow, so each input is shown by one of them."""


def _goes_on(run: Path) -> None:
    with reading(str(run)):
        RunDirectory(run).next_attempt()
        RunDirectory(run).config()


def read_text_files(root: Path, data: bytes) -> None:
    """A hosts file, a config, a manifest, an index, a list of nodes: from the same bytes."""
    path = root / "input"
    path.write_bytes(data)
    with harmless():
        _ours(lambda: read_hosts(path))
        _ours(lambda: load_config(path, argv=[]))
        _ours(lambda: Manifest.from_json(data))
        _ours(lambda: read_index(data, {"data-00000.bin": 64}))
        with suppress(ValueError):
            nodes_from_json(data)


@st.composite
def manifests(draw: st.DrawFn) -> bytes:
    """With their own checksum put right."""
    body = json.loads(Manifest(6, 1, {"tp": 1}, "ddp", {}).to_json())
    del body["self_crc32"]
    body[draw(st.sampled_from(sorted(body)))] = draw(VALUES)
    return json.dumps({**body, "self_crc32": fingerprint(body)}).encode()


@st.composite
def indexes(draw: st.DrawFn) -> bytes:
    """Of about the right form."""
    small = st.integers(-1, 5) | NUMBERS
    sizes = st.lists(small, max_size=3)
    file = st.sampled_from(["data-00000.bin", "../x"]) | VALUES
    chunk = st.tuples(sizes, sizes, file, small, small, WORDS).map(list)
    dtype = st.sampled_from(["float32", "bool", "quint8", "x", "load"]) | VALUES
    entry = st.fixed_dictionaries({"dtype": dtype, "size": sizes, "chunks": st.lists(chunk)})
    return json.dumps(draw(st.dictionaries(WORDS, entry | VALUES, max_size=2))).encode()


def documents() -> st.SearchStrategy[bytes]:
    """Any of them."""
    hosts = b"node-a slots=8 address=10.0.0.2\nnode-b slots=8\n"
    config = b'{"global_batch_size": 8, "max_steps": 3, "name": "x"}'
    return changed(hosts) | changed(config) | manifests() | indexes()


def run_files() -> st.SearchStrategy[tuple[str, bytes]]:
    """A file of a run, changed."""

    def of(name: str) -> st.SearchStrategy[tuple[str, bytes]]:
        return st.tuples(st.just(name), changed(GOOD.get(name, b'{"exit_code": 0}')))

    return st.sampled_from(READ).flatmap(of)


GOOD: dict[str, bytes] = {}
"""By name: what `small_run` writes; filled before the first input is drawn."""


def prepare(root: Path) -> None:
    """Write the good run."""
    good = _template(root)
    files = [path for path in good.rglob("*") if path.is_file()]
    for show in SHOWN.values():  # what is imported when it is first used takes its time
        show(good)
    GOOD.update({str(path.relative_to(good)): path.read_bytes() for path in files})
