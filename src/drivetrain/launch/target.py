"""Target: a place a run is launched on, behind five small acts.

`render` is pure and gives the exact thing that will be submitted; `submit`, `poll`, `logs` and
`stop` act on the real scheduler. A target is a frozen dataclass: its fields are its own options
(made with `option`), and so flags on the command line and keys of job.json without another word.

    drivetrain train --on slurm --nodes 2 --partition main train.py
    drivetrain logs RUN -f;  drivetrain jobs RUN;  drivetrain stop RUN;  drivetrain resume RUN
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Protocol, runtime_checkable

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.plugins import Plugins
from drivetrain.launch.job import Job

TARGETS = Plugins(
    "drivetrain.targets",
    {
        "local": "drivetrain.launch.targets.local:Local",
        "slurm": "drivetrain.launch.targets.slurm:Slurm",
        "hosts": "drivetrain.launch.targets.hosts:SshHosts",
        "kubernetes": "drivetrain.launch.targets.kubernetes:Kubernetes",
        "ray": "drivetrain.launch.targets.ray:Ray",
    },
)
"""By name; other packages add theirs by an entry point. Imported when it is asked for."""


class State(StrEnum):
    """Where a job is, in words that fit every scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    UNKNOWN = "unknown"

    @property
    def is_over(self) -> bool:
        """Whether nothing will happen by itself any more."""
        return self in (State.FINISHED, State.FAILED, State.STOPPED)


@dataclass(frozen=True)
class Status:
    """What the scheduler says of a job."""

    state: State
    detail: str = ""
    """The scheduler's own words: why it waits, how it failed."""
    hosts: tuple[str, ...] = ()
    exit_code: int | None = None


@dataclass(frozen=True)
class Rendered:
    """The exact thing that will be submitted."""

    filename: str
    """job.sh, job.yaml …: it is kept under this name in the run's directory."""
    text: str
    command: tuple[str, ...] = ()
    """What hands it over, for people to read; the file's name stands in it."""


class Target(Protocol):
    """What every target can do. All but `render` and `problems` touch the world."""

    name: ClassVar[str]

    def problems(self, job: Job) -> list[Problem]:
        """What would be refused, or go wrong, known before anything is submitted."""
        ...

    def render(self, job: Job) -> Rendered:
        """Pure: the same job gives the same text."""
        ...

    def submit(self, job: Job, rendered: Rendered) -> str:
        """Hand it over; the scheduler's id of it. The run's directory exists."""
        ...

    def poll(self, job: Job, job_id: str) -> Status:
        """Ask the scheduler."""
        ...

    def logs(self, job: Job, job_id: str, *, follow: bool) -> Iterator[str]:
        """What the run printed, as text in pieces; `follow`: until it is over."""
        ...

    def stop(self, job: Job, job_id: str) -> None:
        """Ask the ranks to save and end; what does not end in time is ended."""
        ...


@runtime_checkable
class FillsIn(Protocol):
    """A target that knows what a user may leave unsaid, such as how many nodes there are."""

    def fill_in(self, job: Job, given: Collection[str]) -> Job:
        """The job, completed; `given` are the flags the user wrote."""
        ...


def option(help: str, default: Any = None) -> Any:  # noqa: A002 - argparse's word for it
    """A field of a target that users set by the flag of its name."""
    return dataclasses.field(default=default, metadata={"help": help})


def target_type(name: str) -> type[Any]:
    """The class of a target, imported now."""
    if name not in TARGETS.names:
        near = difflib.get_close_matches(name, TARGETS.names, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"one of {', '.join(TARGETS.names)}"
        raise ConfigError([Problem("--on", "no such target", remedy, name)])
    found: type[Any] = TARGETS.load(name)
    return found


def add_options(parser: argparse.ArgumentParser, kind: type[Any]) -> None:
    """A flag for each of a target's options; a list is a flag that may be given again."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        flag = f"--{field.name.replace('_', '-')}"
        of = _plain(hints[field.name])
        text = field.metadata["help"]
        if of is bool:
            parser.add_argument(flag, action="store_true", help=text)
        elif of is tuple:
            more = f"{text}; may be given again"
            parser.add_argument(flag, action="append", default=[], help=more, metavar="VALUE")
        else:
            shown = text if field.default is None else f"{text} ({field.default})"
            parser.add_argument(
                flag, type=of, default=field.default, help=shown.replace("%", "%%"), metavar="VALUE"
            )


def options_text(name: str) -> str:
    """Each of a target's flags with what it means, for people."""
    kind = target_type(name)
    parser = argparse.ArgumentParser(
        prog=f"drivetrain train --on {name}",
        usage=f"drivetrain train --on {name} [FLAGS] SCRIPT [ARGS]",
        description=(kind.__doc__ or "").strip().splitlines()[0],
        epilog="Flags of every run: drivetrain train --help.",
        add_help=False,
    )
    add_options(parser, kind)
    return parser.format_help()


def with_options(kind: type[Any], values: Mapping[str, Any]) -> Target:
    """The target with its options, from parsed flags or from job.json."""
    known = {field.name for field in dataclasses.fields(kind)}
    chosen = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if name in known
    }
    made: Target = kind(**chosen)
    return made


def _plain(hint: Any) -> type[Any]:
    """`str | None` → str, `tuple[str, ...]` → tuple."""
    if isinstance(hint, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    plain: type[Any] = typing.get_origin(hint) or hint
    return plain
