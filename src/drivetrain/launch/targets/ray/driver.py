"""The options of the Ray target, and the Ray Train driver. Pure: text from values."""

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

# The options of the Ray target, in addition to the job itself.

PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True)
class RayOptions:
    """Each field is a flag of `drivetrain train --on ray`."""

    address: str | None = option(
        "the cluster: http://HEAD:8265, ray://HEAD:10001 or HEAD:6379; default: RAY_ADDRESS"
    )
    cpus_per_worker: int | None = option("CPUs reserved by each process; default: 1")
    resources: tuple[str, ...] = option("another resource of each process: NAME=AMOUNT", ())
    placement: str | None = option(
        "Ray's placement strategy: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD"
    )
    accelerator_type: str | None = option("Ray's accelerator type, such as A100")
    resize_interval: int | None = option(
        "elastic runs: seconds between checks for more nodes; default: 60"
    )
    runtime_env: str | None = option("a YAML file with Ray's runtime environment for the job")
    python: str | None = option("Python on the cluster; default: this one")

    @property
    def interpreter(self) -> str:
        """The Python that runs the driver on the cluster."""
        return self.python or sys.executable

    def option_problems(self) -> list[Problem]:
        """Return all problems of the options."""
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
        return [Problem("--placement", "no such placement strategy", remedy, given)]

    def _number_problems(self) -> list[Problem]:
        numbers = {"cpus_per_worker": self.cpus_per_worker, "resize_interval": self.resize_interval}
        return [
            Problem(f"--{name.replace('_', '-')}", "must be at least 1", "leave it out", value)
            for name, value in numbers.items()
            if value is not None and value < 1
        ]

    def resources_per_worker(self, num_gpus: int) -> dict[str, float]:
        """Return the resources that Ray reserves for each process."""
        asked: dict[str, float] = {"CPU": self.cpus_per_worker or 1}
        if num_gpus:
            asked["GPU"] = num_gpus
        return asked | dict(pair for text in self.resources if (pair := _resource(text)))

    def environment_file(self) -> dict[str, Any]:
        """Read the user's runtime environment file."""
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
            rule = "must be a mapping of keys to values"
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
"""The default of `drivetrain train`."""
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
    # each worker runs the unchanged script
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
        # Ray restarts the workers; they resume from the checkpoints in run_dir
        failure_config=FailureConfig(max_failures={max_failures}),
        # ends a run that would only fail in the same way again
        callbacks=[Judge(run_dir, max_failures={max_failures})],
    ),
)
sys.exit(fit(trainer))
'''


def driver_script(job: Job, options: RayOptions) -> str:
    """Return the whole script; the same job gives the same text."""
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
    """Return the script and its arguments, as a worker runs them."""
    return [*(["-m"] if job.is_module else []), job.script, *job.script_args]


def max_failures(job: Job) -> int:
    """Return Ray's `max_failures`, from `--max-restarts`."""
    given = _given(job, "--max-restarts")
    return int(given[-1]) if given and given[-1].isdigit() else MAX_RESTARTS


def _accepted(job: Job) -> str:
    """Return a line with the accepted changes for the workers, if there are any."""
    keys = _given(job, _ACCEPT)
    return f'\n        "accepted_changes": {_literal(keys)},' if keys else ""


def _given(job: Job, flag: str) -> list[str]:
    return [word.partition("=")[2] for word in job.flags if word.startswith(f"{flag}=")]


def foreign_flags(job: Job) -> list[str]:
    """Return flags for Drivetrain's supervisor, which Ray replaces."""
    return [word for word in job.flags if word.partition("=")[0] not in _UNDERSTOOD]


def num_workers(job: Job) -> int | tuple[int, int]:
    """Return one worker per process; the minimum and maximum if the run is elastic."""
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
    """SPREAD for one process per node on several nodes; else PACK them as closely as possible."""
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
    """Return a Python literal with double quotes."""
    return json.dumps(value, ensure_ascii=False)
