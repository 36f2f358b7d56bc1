"""Identity: one process's place in its world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from drivetrain.core.errors import EnvironmentProblem, Problem


@dataclass(frozen=True)
class Identity:
    """Ranks count processes, `node_rank` counts machines; `main_address` is where they meet."""

    environment: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    main_address: str
    main_port: int

    @property
    def is_main(self) -> bool:
        """Whether this process speaks for the run."""
        return self.rank == 0


class ClusterEnvironment(Protocol):
    """One way in which processes are started and told who they are."""

    name: ClassVar[str]

    @staticmethod
    def detect(variables: Mapping[str, str]) -> bool:
        """Whether these variables are this environment's."""
        ...

    @staticmethod
    def identity(variables: Mapping[str, str]) -> Identity:
        """Who this process is."""
        ...


def whole_number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A variable as a number, or an error that names it."""
    text = variables.get(name)
    if text is None:
        if default is not None:
            return default
        raise EnvironmentProblem(
            [Problem(name, "not set", "start the script with its launcher", has_value=False)]
        )
    try:
        return int(text)
    except ValueError:
        raise EnvironmentProblem(
            [Problem(name, "must be a whole number", "see who sets this variable", text)]
        ) from None
