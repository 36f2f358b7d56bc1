"""What a user may say to Ray beyond the job itself."""

from __future__ import annotations

import difflib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.launch.target import option

PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True)
class Options:
    """Each field is a flag of `drivetrain train --on ray`."""

    address: str | None = option(
        "the cluster: http://HEAD:8265, ray://HEAD:10001 or HEAD:6379; default: RAY_ADDRESS"
    )
    cpus_per_worker: int | None = option("CPUs that each process reserves; 1 if left")
    resources: tuple[str, ...] = option("NAME=AMOUNT of another resource for each process", ())
    placement: str | None = option("PACK, SPREAD, STRICT_PACK or STRICT_SPREAD, as Ray has them")
    accelerator_type: str | None = option("the GPUs' kind, as Ray names it, such as A100")
    resize_interval: int | None = option("elastic: seconds between looks for more nodes; 60")
    runtime_env: str | None = option("a YAML file with Ray's runtime environment for the job")
    python: str | None = option("the cluster's Python; default: this one")

    @property
    def interpreter(self) -> str:
        """What runs the driver on the cluster."""
        return self.python or sys.executable

    def option_problems(self) -> list[Problem]:
        """All that is wrong with the options themselves."""
        found = [*self._placement_problems(), *self._number_problems()]
        for text in self.resources:
            if _resource(text) is None:
                rule = "not a resource and its amount"
                found.append(Problem("--resources", rule, "--resources high_memory=1", text))
        try:
            self.environment_file()
        except ConfigError as error:
            found += error.problems
        return found

    def _placement_problems(self) -> list[Problem]:
        given = self.placement
        if given is None or given.upper() in PLACEMENTS:
            return []
        near = difflib.get_close_matches(given.upper(), PLACEMENTS, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"one of {', '.join(PLACEMENTS)}"
        return [Problem("--placement", "Ray has no such placement", remedy, given)]

    def _number_problems(self) -> list[Problem]:
        numbers = {"cpus_per_worker": self.cpus_per_worker, "resize_interval": self.resize_interval}
        return [
            Problem(f"--{name.replace('_', '-')}", "must be at least 1", "leave it out", value)
            for name, value in numbers.items()
            if value is not None and value < 1
        ]

    def resources_per_worker(self, num_gpus: int) -> dict[str, float]:
        """What Ray is to reserve for each process."""
        asked: dict[str, float] = {"CPU": self.cpus_per_worker or 1}
        if num_gpus:
            asked["GPU"] = num_gpus
        return asked | dict(pair for text in self.resources if (pair := _resource(text)))

    def environment_file(self) -> dict[str, Any]:
        """The runtime environment the user wrote down."""
        if self.runtime_env is None:
            return {}
        try:
            content = yaml.safe_load(Path(self.runtime_env).read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            rule = str(error).splitlines()[0]
            raise ConfigError(
                [Problem("--runtime-env", rule, "give a YAML file", self.runtime_env)]
            ) from None
        if not isinstance(content, dict):
            remedy = "pip: [einops]"
            rule = "must be keys and values"
            raise ConfigError([Problem("--runtime-env", rule, remedy, self.runtime_env)])
        return content


def _resource(text: str) -> tuple[str, float] | None:
    name, has_amount, amount = text.partition("=")
    try:
        return (name, float(amount)) if name and has_amount else None
    except ValueError:
        return None
