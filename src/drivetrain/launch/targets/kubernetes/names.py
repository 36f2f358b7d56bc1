"""Names that Kubernetes accepts, and the run's directory as its pods see it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import PurePosixPath

from drivetrain.launch.job import Job
from drivetrain.launch.targets.kubernetes.options import Options

# A pod of a JobSet is called NAME-node-0-INDEX-SUFFIX, in 63 characters.
MOST_CHARACTERS = 40
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def object_name(job: Job) -> str:
    """The job's name with a mark of its run: two runs of one script do not collide."""
    plain = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")
    if plain[:1].isdigit():  # a Service's name begins with a letter
        plain = f"run-{plain}"
    mark = hashlib.sha256(job.run_dir.encode()).hexdigest()[:5]
    return f"{plain}-{mark}"


def in_pods(job: Job, options: Options) -> Job:
    """The same job, its directory where the volume is mounted."""
    folder = PurePosixPath(options.mount_path) / PurePosixPath(job.run_dir).name
    return replace(job, run_dir=str(folder))


def keeps_checkpoints_in_store(job: Job) -> bool:
    """Whether checkpoints go to an object store, so that no volume is needed."""
    prefix = "checkpoint.directory="
    return any(w.startswith(prefix) and "://" in w for w in job.script_args)
