"""What the cluster file promises, as far as the doctor can measure it."""

from __future__ import annotations

from drivetrain.cluster.catalogue import catalogue
from drivetrain.cluster.description import Link
from drivetrain.cluster.file import cluster_from, link_of, read_cluster
from drivetrain.doctor.facts import Expected


def read_expected(said: str) -> Expected:
    """Of a cluster file or a name of the catalogue; a file may speak of the network alone."""
    given = read_cluster(said)
    if given.device is None and given.instance is None:
        link = None if given.between is None else link_of(given.between, catalogue())
        return _expected(link, given.devices_per_node)
    cluster = cluster_from(given)
    has_devices = cluster.device is not None and cluster.device.is_accelerator
    return _expected(cluster.between, cluster.devices_per_node if has_devices else None)


def _expected(link: Link | None, num_devices: int | None) -> Expected:
    """A latency of 0 was not stated."""
    return Expected(
        bytes_per_s=None if link is None else link.bytes_per_s,
        latency_s=None if link is None else link.latency_s or None,
        devices_per_node=num_devices,
    )
