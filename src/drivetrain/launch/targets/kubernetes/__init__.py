"""Kubernetes: manifests for its own Job and for three operators, handed over by its client."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import yaml

from drivetrain.core.errors import Problem
from drivetrain.launch.job import Job
from drivetrain.launch.target import Rendered, Status
from drivetrain.launch.targets.kubernetes import options
from drivetrain.launch.targets.kubernetes.manifests import objects
from drivetrain.launch.targets.kubernetes.options import (
    KubernetesOptions,
    in_pods,
    object_name,
)
from drivetrain.launch.yaml_text import yaml_text

if TYPE_CHECKING:
    from drivetrain.launch.targets.kubernetes.client import Client


__all__ = ["Kubernetes"]


# The target: options in, a manifest out; the API is spoken to by `client.py`.

_FILE = "job.yaml"


@dataclass(frozen=True)
class Kubernetes(KubernetesOptions):
    """A run as a Job, JobSet, TrainJob or RayJob."""

    name: ClassVar[str] = "kubernetes"
    run_is_elsewhere: ClassVar[bool] = True
    """On a volume, in a folder that has its name from the client's."""

    def problems(self, job: Job) -> list[Problem]:
        """What is wrong with what was said."""
        return options.problems(job, self)

    def render(self, job: Job) -> Rendered:
        """The manifest, as `kubectl apply` would take it."""
        documents = (yaml_text(each) for each in objects(job, self))
        command = ("kubectl", "apply", "--filename", _FILE)
        return Rendered(_FILE, "---\n".join(documents), command)

    def submit(self, job: Job, rendered: Rendered) -> str:
        """Create the objects; those of an earlier start make way if that is over."""
        self._client().create([*yaml.safe_load_all(rendered.text)])
        return f"{self.kind}/{object_name(job)}"

    def poll(self, job: Job, job_id: str) -> Status:  # noqa: ARG002 - the name says it all
        """By the object's conditions, its pods and their events."""
        return self._client().status(self.kind, object_name(job))

    def logs(self, job: Job, job_id: str, *, follow: bool) -> Iterator[str]:  # noqa: ARG002
        """Of the node with rank 0."""
        return self._client().logs(self.kind, object_name(job), follow=follow)

    def stop(self, job: Job, job_id: str) -> None:  # noqa: ARG002
        """Delete the objects: pods get SIGTERM, and time to save."""
        self._client().delete(objects(job, self))

    def run_dir_of(self, job: Job) -> str:
        """Where the run's directory is, for whoever has the volume mounted at the same path."""
        return in_pods(job, self).run_dir

    def _client(self) -> Client:
        from drivetrain.launch.targets.kubernetes.client import connect

        return connect(self.namespace, self.context)
