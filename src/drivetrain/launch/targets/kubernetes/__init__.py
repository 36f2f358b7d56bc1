"""The Kubernetes target: manifests for a Job or one of three operators, and an API client."""

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


# The target turns options into a manifest; `client.py` talks to the API.

_FILE = "job.yaml"


@dataclass(frozen=True)
class Kubernetes(KubernetesOptions):
    """Run on Kubernetes as a Job, JobSet, TrainJob or RayJob."""

    name: ClassVar[str] = "kubernetes"
    run_is_elsewhere: ClassVar[bool] = True
    """The run directory is on a volume; its name is derived from the client's directory."""

    def problems(self, job: Job) -> list[Problem]:
        """Return the problems of the options and the job."""
        return options.problems(job, self)

    def render(self, job: Job) -> Rendered:
        """Return the manifest, as for `kubectl apply`."""
        documents = (yaml_text(each) for each in objects(job, self))
        command = ("kubectl", "apply", "--filename", _FILE)
        return Rendered(_FILE, "---\n".join(documents), command)

    def submit(self, job: Job, rendered: Rendered) -> str:
        """Create the objects; replace those of an earlier start if that is over."""
        self._client().create([*yaml.safe_load_all(rendered.text)])
        return f"{self.kind}/{object_name(job)}"

    def poll(self, job: Job, job_id: str) -> Status:  # noqa: ARG002 - the name is enough
        """Return the status from the object's conditions, its pods and their events."""
        return self._client().status(self.kind, object_name(job))

    def logs(self, job: Job, job_id: str, *, follow: bool) -> Iterator[str]:  # noqa: ARG002
        """Yield the output of the node with rank 0."""
        return self._client().logs(self.kind, object_name(job), follow=follow)

    def stop(self, job: Job, job_id: str) -> None:  # noqa: ARG002
        """Delete the objects: the pods get SIGTERM and time to save."""
        self._client().delete(objects(job, self))

    def run_dir_of(self, job: Job) -> str:
        """Return the run directory, where the volume is mounted at the same path."""
        return in_pods(job, self).run_dir

    def _client(self) -> Client:
        from drivetrain.launch.targets.kubernetes.client import connect

        return connect(self.namespace, self.context)
