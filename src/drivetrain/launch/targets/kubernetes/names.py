"""Names that Kubernetes accepts, and the run's directory as its pods see it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import PurePosixPath

from drivetrain.launch.job import Job
from drivetrain.launch.targets.kubernetes.options import Options

# A pod of a JobSet is called NAME-node-0-INDEX-SUFFIX, in 63 characters.
MOST_CHARACTERS = 43
MARK_CHARACTERS = 8
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def object_name(job: Job) -> str:
    """The job's name with a mark of its run: two runs of one script do not collide."""
    plain = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")
    if plain[:1].isdigit():  # a Service's name begins with a letter
        plain = f"run-{plain}"
    return f"{plain}-{_mark(job)}"


def in_pods(job: Job, options: Options) -> Job:
    """The same job, its directory where the volume is mounted.

    Everybody's runs lie there side by side: a folder is one run's, and never that of another run
    whose own folder has the same name.
    """
    folder = f"{PurePosixPath(job.run_dir).name}-{_mark(job)}"
    return replace(job, run_dir=str(PurePosixPath(options.mount_path) / folder))


def _mark(job: Job) -> str:
    """Of whose run it is and where its directory lies; neither changes when it is resumed."""
    whose = f"{job.owner}:{job.run_dir}"
    return hashlib.sha256(whose.encode()).hexdigest()[:MARK_CHARACTERS]


def keeps_checkpoints_in_store(job: Job) -> bool:
    """Whether checkpoints go to an object store, so that no volume is needed."""
    prefix = "checkpoint.directory="
    return any(w.startswith(prefix) and "://" in w for w in job.script_args)
