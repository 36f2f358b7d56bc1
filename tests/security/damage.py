"""A small run, the verbs that read it, and what somebody could do to its files."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from drivetrain.cli.main import app, with_flags_of
from drivetrain.core.errors import DrivetrainError
from drivetrain.record.step_file import HEADER_BYTES, header
from tests.security.test_jobs import _job
from tests.unit.test_status import write_run

Damage = Callable[[Path], Any]
VERBS: dict[str, Callable[[str], list[str]]] = {
    "status": lambda run: ["status", run],
    "status --json": lambda run: ["status", run, "--json"],
    "runs": lambda run: ["runs", str(Path(run).parent)],
    "report": lambda run: ["report", run, "-o", f"{run}/../page.html"],
    "compare": lambda run: ["compare", run, run],
    "diagnose": lambda run: ["diagnose", run],
    "watch": lambda run: ["watch", run, "--once"],
    "jobs": lambda run: ["jobs", run],
    "logs": lambda run: ["logs", run],
    "checkpoint ls": lambda run: ["checkpoint", "ls", run],
    "checkpoint verify": lambda run: ["checkpoint", "verify", run],
    "config": lambda run: ["config", "--config", f"{run}/run.yaml"],
}


def small_run(path: Path) -> Path:
    """Everything that the verbs read, all of it good."""
    run = write_run(path, kind="failed", time_s=1020.0, failures=[{"rank": 0, "exit_code": 1}])
    folder = run.attempt(1)
    for name, text in {
        "closed.json": json.dumps({"time_s": 1021.0, "exit_code": 1}),
        "stacks/0.txt": 'Thread 0x1 (most recent call first):\n  File "a.py", line 1 in f\n',
        "collectives/0.json": "{}",
        "non_finite/0.json": "{}",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (path / "plan.json").write_text("{}")
    job = {"target": {"name": "local"}, "job": _job(path), "id": "h:1"}
    (path / "job.json").write_text(json.dumps({**job, "submitted_at": "", "is_stopped": False}))
    (path / "job.yaml").write_text("grace_s: 0\nmembers: []\n")
    (path / "conductor-end.json").write_text('{"exit_code": 0}')
    (path / "logs").mkdir()
    (path / "logs" / "h.txt").write_text("step 1\n")
    (path / "checkpoints" / "step-000000002-a1").mkdir(parents=True)
    return path


def outcome(verb: str, run: Path) -> str:
    """What a verb did: an exit code, or a sentence of an error of ours. Anything else is raised."""
    argv = VERBS[verb](str(run))
    result = CliRunner().invoke(with_flags_of(app, argv), argv)
    error = result.exception
    if error is None or isinstance(error, SystemExit):
        return f"exit code {result.exit_code}"
    if isinstance(error, DrivetrainError):
        return str(error)
    raise error


def _text(name: str, text: str) -> Damage:
    return lambda run: (run / name).write_text(text)


def _more(name: str, text: str) -> Damage:
    def add(run: Path) -> None:
        with (run / name).open("a") as file:
            file.write(text)

    return add


def _json(name: str, **changes: Any) -> Damage:
    def change(run: Path) -> None:
        facts = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps({**facts, **changes}))

    return change


def _replaced(name: str, make: Callable[[Path], Any]) -> Damage:
    def replace(run: Path) -> None:
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        make(path)

    return replace


def _steps(change: Callable[[bytearray], Any]) -> Damage:
    def damage(run: Path) -> None:
        path = run / "events/00000.steps"
        data = bytearray(path.read_bytes())
        changed = change(data)
        path.write_bytes(data if changed is None else changed)

    return damage


def _with_fields(fields: Any) -> Damage:
    text = json.dumps({"fields": fields}).encode().ljust(HEADER_BYTES - 1) + b"\n"
    return _steps(lambda data: text + bytes(data[HEADER_BYTES:]))


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


_LETTERS = "abcdefghijklmnop"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{c}: &{c} [{', '.join([f'*{b}'] * 9)}]\n" for b, c in pairwise(_LETTERS)
)
START, END, RUN = "attempts/0001/start.json", "attempts/0001/end.json", "run.yaml"
EVENTS, STEPS = "events/00000.jsonl", "events/00000.steps"
READ = [RUN, START, END, "attempts/0001/closed.json", EVENTS, STEPS, "plan.json", "job.json"]
READ += ["job.yaml", "conductor-end.json", "conductor.lock", "attempts/0001/stacks/0.txt"]
READ += ["attempts/0001/collectives/0.json", "logs/h.txt", "checkpoints/attempt-00001.json"]
READ += ["checkpoints/step-000000002-a1/manifest.json"]
KINDS: dict[str, Damage] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "endless": _endless,
    "sparse": _sparse,
}
KINDS |= {"loop": _loop}

DAMAGES: dict[str, Damage] = {
    "bad yaml": _text(RUN, "a: [1\n b"),
    "a list in run.yaml": _text(RUN, "config: [1, 2]\n"),
    "a list as run.yaml": _text(RUN, "[1, 2]\n"),
    "alias bomb": _text(RUN, f"{BOMB}config: {{optimization: *i, record: *j, max_steps: *h}}\n"),
    "yaml inside itself": _text(RUN, "config: &a {b: *a}\n"),
    "deep yaml": _text(RUN, "[" * 20_000),
    "a python object": _text(RUN, "config: !!python/object/apply:os.system ['true']\n"),
    "numbers for sections": _text(RUN, "config: {record: 3, checkpoint: 4, max_steps: [1]}\n"),
    "start is a list": _text(START, "[1]"),
    "start of wrong types": _json(START, started_s="x", world_size="many", resumed_step={}),
    "start out of range": _json(START, started_s=1e300, world_size=-5, total_steps=-1),
    "start not a number": _text(START, '{"started_s": NaN, "launched_s": Infinity}'),
    "start of many ranks": _json(START, world_size=10**12),
    "layout is a list": _json(START, layout=[1], device_name={}, host=[1], total_steps="x"),
    "end of wrong types": _json(END, kind=["x"], time_s="now", failures="no"),
    "failures of wrong types": _json(END, failures=[[1], 2], exits=[1], hosts=5, step="x"),
    "failure of wrong types": _json(END, failures=[{"rank": {}, "exit_code": "x", "error": 5}]),
    "end in a year nobody sees": _json(END, time_s=1e18),
    "an attempt of a high number": lambda run: (run / "attempts" / ("9" * 20)).mkdir(),
    "an attempt that is none": lambda run: (run / "attempts" / "1x").mkdir(),
    "an attempt in other digits": lambda run: (run / "attempts" / "٣").mkdir(),
    "a rank of a high number": _text("events/99999999999.jsonl", "{}"),
    "a rank in other digits": _text("events/²³.jsonl", "{}"),
    "garbage steps": _steps(lambda _: os.urandom(2000)),
    "no header": _steps(
        lambda data: b" " * (HEADER_BYTES - 1) + b"\n" + bytes(data[HEADER_BYTES:])
    ),
    "objects in steps": _with_fields([["step", "O"], ["x", "<f4"]]),
    "no fields": _with_fields([]),
    "few fields": _with_fields([["step", "<u4"]]),
    "fields of wrong types": _with_fields(5),
    "huge records": _with_fields([["step", "<u4"], ["x", "V1000000000"]]),
    "one header only": _steps(lambda _: header()),
    "a step of a high number": _steps(
        lambda data: data.__setitem__(slice(HEADER_BYTES, HEADER_BYTES + 4), b"\xff" * 4)
    ),
    "steps at no time": _steps(
        lambda data: struct.pack_into("<d", data, HEADER_BYTES + 8, float("nan"))
    ),
    "steps at the end of time": _steps(
        lambda data: struct.pack_into("<d", data, HEADER_BYTES + 8, 1e308)
    ),
    "a step that takes for ever": _steps(
        lambda data: struct.pack_into("<f", data, HEADER_BYTES + 16, float("inf"))
    ),
    "strange events": _more(
        EVENTS,
        '{"kind":"scalars","step":1e400,"time_s":NaN,"values":{"x":"NaN"}}\n'
        '{"kind":"scalars","step":5,"time_s":1e300,"values":{"train/loss":1e999}}\n[]\n"x"\n5\n'
        '{"kind":"instant","name":1,"time_s":1,"fields":[1,2]}\n'
        '{"kind":"scalars","step":5,"time_s":1,"values":[1]}\n'
        '{"kind":"scalars","step":-5,"time_s":1,"values":{"train/loss":1}}\n'
        '{"kind":"scalars","step":99999999999999999999999,"time_s":1,"values":{"train/loss":1}}\n'
        '{"kind":"span","name":"save","step":1,"start_s":1,"duration_s":1e300}\n'
        '{"kind":{},"name":[],"time_s":"1"}\n',
    ),
    "deep events": _more(EVENTS, "[" * 100_000 + "\n"),
    "losses of no number": _more(
        EVENTS,
        "".join(
            f'{{"kind":"scalars","step":{n},"time_s":1015,"values":{{"train/loss":NaN}}}}\n'
            for n in range(1, 9)
        ),
    ),
    "a plan of wrong types": _text("plan.json", '{"ranks":"x","step_s":[],"plans":5}'),
    "a job of wrong types": _text("job.json", '{"target": 5, "job": [], "id": {}}'),
    "members of wrong types": _text("job.yaml", "members: 5\ngrace_s: []\n"),
    "an end of wrong types": _text("conductor-end.json", '{"exit_code": "x"}'),
}
NO_FILES: dict[str, Damage] = {
    f"{kind} for {name}": _replaced(name, make) for name in READ for kind, make in KINDS.items()
}
del NO_FILES["sparse for logs/h.txt"]  # a log may be as long as it likes: it is handed on in pieces


def readers(name: str) -> list[str]:
    """The verbs that read a file; the others are slow, and read no more than these."""
    if "job" in name or "conductor" in name or "logs" in name:
        return ["jobs", "logs"]
    return ["checkpoint ls"] if "checkpoints" in name else ["status", "diagnose"]
