"""Kubernetes: manifests for its own Job and for three operators, handed over by its client."""

from drivetrain.launch.targets.kubernetes.target import Kubernetes

__all__ = ["Kubernetes"]
