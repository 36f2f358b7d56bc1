"""Which environment started this process."""

from __future__ import annotations

import os
from collections.abc import Mapping

from drivetrain.cluster.environments import ENVIRONMENTS
from drivetrain.cluster.identity import Identity
from drivetrain.core.errors import EnvironmentProblem, Problem


def detect(variables: Mapping[str, str] | None = None) -> Identity:
    """Who this process is, from its environment variables."""
    variables = os.environ if variables is None else variables
    environment = next(env for env in ENVIRONMENTS if env.detect(variables))
    identity = environment.identity(variables)
    if not 0 <= identity.rank < identity.world_size:
        raise EnvironmentProblem(
            [
                Problem(
                    f"rank ({identity.environment})",
                    f"outside a world of {identity.world_size}",
                    "clear stale RANK and WORLD_SIZE variables, or start with the launcher",
                    identity.rank,
                )
            ]
        )
    return identity
