"""Target: where a run is launched, behind five small methods.

`render` is pure and returns exactly what will be submitted; `submit`, `poll`, `logs` and `stop` act
on the real scheduler. A target is a frozen dataclass: its fields are its options (made with
`option`), and so also flags on the command line and keys of job.json.

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
"""The targets by name, imported on use; other packages add theirs by an entry point."""


class State(StrEnum):
    """The state of a job, in terms common to all schedulers."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    UNKNOWN = "unknown"

    @property
    def is_over(self) -> bool:
        """Whether the job has ended."""
        return self in (State.FINISHED, State.FAILED, State.STOPPED)


@dataclass(frozen=True)
class Status:
    """A job's status as the scheduler reports it."""

    state: State
    detail: str = ""
    """The scheduler's reason: why the job waits, or how it failed."""
    hosts: tuple[str, ...] = ()
    exit_code: int | None = None


@dataclass(frozen=True)
class Rendered:
    """What will be submitted, exactly."""

    filename: str
    """job.sh, job.yaml …: the name of its file in the run directory."""
    text: str
    command: tuple[str, ...] = ()
    """The command that would submit the file, for people to read."""


class Target(Protocol):
    """The interface of every target. Only `render` and `problems` have no side effects."""

    name: ClassVar[str]

    def problems(self, job: Job) -> list[Problem]:
        """Return what would be refused or go wrong, before anything is submitted."""
        ...

    def render(self, job: Job) -> Rendered:
        """Return what will be submitted. Pure: the same job gives the same text."""
        ...

    def submit(self, job: Job, rendered: Rendered) -> str:
        """Submit it; return the scheduler's job id. The run directory exists already."""
        ...

    def poll(self, job: Job, job_id: str) -> Status:
        """Ask the scheduler for the job's status."""
        ...

    def logs(self, job: Job, job_id: str, *, follow: bool) -> Iterator[str]:
        """Yield what the run printed, in pieces; with `follow`, until it is over."""
        ...

    def stop(self, job: Job, job_id: str) -> None:
        """Ask the ranks to save and end; kill those that do not end in time."""
        ...


@runtime_checkable
class FillsIn(Protocol):
    """A target that can supply what the user left out, such as the number of nodes."""

    def fill_in(self, job: Job, given: Collection[str]) -> Job:
        """Return the completed job; `given` holds the flags that the user gave."""
        ...


def option(help: str, default: Any = None) -> Any:  # noqa: A002 - argparse's word for it
    """A field of a target that users set with the flag of the same name."""
    return dataclasses.field(default=default, metadata={"help": help})


def target_type(name: str) -> type[Any]:
    """Import and return the class of a target."""
    if name not in TARGETS.names:
        near = difflib.get_close_matches(name, TARGETS.names, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"one of {', '.join(TARGETS.names)}"
        raise ConfigError([Problem("--on", "no such target", remedy, name)])
    found: type[Any] = TARGETS.load(name)
    return found


def add_options(parser: argparse.ArgumentParser, kind: type[Any]) -> None:
    """Add a flag for each of a target's options; a list is a flag that can be repeated."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        flag = f"--{field.name.replace('_', '-')}"
        of = _plain(hints[field.name])
        text = field.metadata["help"]
        if of is bool:
            parser.add_argument(flag, action="store_true", help=text)
        elif of is tuple:
            more = f"{text}; can be repeated"
            parser.add_argument(flag, action="append", default=[], help=more, metavar="VALUE")
        else:
            shown = text if field.default is None else f"{text} ({field.default})"
            parser.add_argument(
                flag, type=of, default=field.default, help=shown.replace("%", "%%"), metavar="VALUE"
            )


def options_text(name: str) -> str:
    """Return the help text of a target's flags."""
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
    """Create the target with its options, from parsed flags or from job.json."""
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
