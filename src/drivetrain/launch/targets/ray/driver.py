"""What a user may say to Ray, and the Ray Train driver made of it. Pure: text from values."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.launch.job import Job
from drivetrain.launch.target import option

# What a user may say to Ray beyond the job itself.

PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True)
class RayOptions:
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


# The driver of a job: a Ray Train script. Pure: text from values.

MAX_RESTARTS = 100
"""As `drivetrain train` has it everywhere."""
_ACCEPT = "--accept-change"
_UNDERSTOOD = ("--max-restarts", _ACCEPT, "-m", "--module")

_TEXT = '''"""{title}. By hand: RAY_ADDRESS=HEAD:6379 python job.py"""

import sys

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from drivetrain.launch.targets.ray.ending import fit
from drivetrain.launch.targets.ray.judge import Judge
from drivetrain.launch.targets.ray.worker import run_script

run_dir = {run_dir}

trainer = TorchTrainer(
    # each worker runs the script as it is
    run_script,
    train_loop_config={{
        "argv": {argv},
        "working_dir": {working_dir},
        "run_dir": run_dir,{accepted}
    }},
    torch_config=TorchConfig(backend={backend}),
    scaling_config=ScalingConfig(
{scaling}
    ),
    run_config=RunConfig(
        name="ray",
        storage_path=run_dir,
        # Ray starts the workers again; the checkpoints in run_dir say where they go on
        failure_config=FailureConfig(max_failures={max_failures}),
        # and this ends a run that would only fail the same way again
        callbacks=[Judge(run_dir, max_failures={max_failures})],
    ),
)
sys.exit(fit(trainer))
'''


def driver_script(job: Job, options: RayOptions) -> str:
    """Every line of it, the same for the same job."""
    return _TEXT.format(
        title=f"{job.name} on Ray: {_count(job)}",
        run_dir=_literal(job.run_dir),
        working_dir=_literal(job.working_dir),
        argv=_literal(script_argv(job)),
        accepted=_accepted(job),
        backend=_literal("cpu:gloo,cuda:nccl" if job.gpus_per_node else "gloo"),
        scaling="".join(f"        {line},\n" for line in _scaling(job, options)).rstrip("\n"),
        max_failures=max_failures(job),
    )


def script_argv(job: Job) -> list[str]:
    """The script and its arguments, as a worker runs them."""
    return [*(["-m"] if job.is_module else []), job.script, *job.script_args]


def max_failures(job: Job) -> int:
    """`--max-restarts`, in Ray's words."""
    given = _given(job, "--max-restarts")
    return int(given[-1]) if given and given[-1].isdigit() else MAX_RESTARTS


def _accepted(job: Job) -> str:
    """A line for the workers, where the run may go on although something has changed."""
    keys = _given(job, _ACCEPT)
    return f'\n        "accepted_changes": {_literal(keys)},' if keys else ""


def _given(job: Job, flag: str) -> list[str]:
    return [word.partition("=")[2] for word in job.flags if word.startswith(f"{flag}=")]


def foreign_flags(job: Job) -> list[str]:
    """Flags of `drivetrain train` that are about its own supervisor, which Ray stands in for."""
    return [word for word in job.flags if word.partition("=")[0] not in _UNDERSTOOD]


def num_workers(job: Job) -> int | tuple[int, int]:
    """One per process; from the fewest to the most when the run is elastic."""
    fewest = job.num_nodes * job.processes_per_node
    return (fewest, job.max_nodes * job.processes_per_node) if job.is_elastic else fewest


def _scaling(job: Job, options: RayOptions) -> Iterator[str]:
    yield f"num_workers={num_workers(job)!r}"
    if job.is_elastic and options.resize_interval is not None:
        yield f"elastic_resize_monitor_interval_s={options.resize_interval}"
    gpus = 1 if job.gpus_per_node else 0
    if gpus:
        yield "use_gpu=True"
    yield f"resources_per_worker={_literal(_plain(options.resources_per_worker(gpus)))}"
    yield f"placement_strategy={_literal(_placement(job, options))}"
    if options.accelerator_type is not None:
        yield f"accelerator_type={_literal(options.accelerator_type)}"


def _placement(job: Job, options: RayOptions) -> str:
    """One process per node asks for as many nodes; several per node go as close as they can."""
    if options.placement is not None:
        return options.placement.upper()
    return "SPREAD" if job.max_nodes > 1 and job.processes_per_node == 1 else "PACK"


def _plain(amounts: dict[str, float]) -> dict[str, float]:
    return {name: int(n) if n == int(n) else n for name, n in amounts.items()}


def _count(job: Job) -> str:
    workers = num_workers(job)
    if isinstance(workers, int):
        return f"{workers} worker{'s' if workers > 1 else ''}"
    return f"{workers[0]} to {workers[1]} workers"


def _literal(value: Any) -> str:
    """As Python has it, with the quotes that people write."""
    return json.dumps(value, ensure_ascii=False)
