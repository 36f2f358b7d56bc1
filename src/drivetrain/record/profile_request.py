"""ProfileRequest: what `drivetrain profile` asks of the ranks, passed on in the environment."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "DRIVETRAIN_PROFILE"


@dataclass(frozen=True)
class ProfileRequest:
    """Which ranks and steps, and where the traces go."""

    folder: str
    ranks: tuple[int, ...] = (0,)
    """Empty: all of them."""
    first_step: int = 5
    last_step: int = 10
    py_spy: bool = False

    def wants(self, rank: int, step: int) -> bool:
        """Steps count from 1."""
        is_chosen = not self.ranks or rank in self.ranks
        return is_chosen and self.first_step <= step <= self.last_step

    def trace(self, rank: int) -> Path:
        """The name that TensorBoard's plug-in and Perfetto take."""
        return Path(self.folder) / f"rank-{rank:05d}.pt.trace.json.gz"

    def flame_graph(self, rank: int) -> Path:
        """py-spy's picture."""
        return Path(self.folder) / f"rank-{rank:05d}.svg"

    def environment(self) -> dict[str, str]:
        """For the ranks."""
        return {
            VARIABLE: json.dumps(asdict(self)),
            "KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "5"),  # says it is starting
        }

    @classmethod
    def from_environment(cls) -> ProfileRequest:
        """In a rank."""
        plain = json.loads(os.environ[VARIABLE])
        return cls(**{**plain, "ranks": tuple(plain["ranks"])})
