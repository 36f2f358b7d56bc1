"""cluster.yaml: what a user may say about a cluster, and how names of the catalogue are filled in.

    instance: p5.48xlarge        # or: device, devices_per_node, inside, between … one by one
    nodes: 8

Every value that is stated wins over the catalogue's.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from drivetrain.cluster.catalogue import Catalogue, DeviceEntry, LinkEntry, catalogue
from drivetrain.cluster.description import Cluster, Device, Link
from drivetrain.config.schema import Section
from drivetrain.core.errors import ConfigError, Problem


class ClusterFile(Section):
    """The file, as written."""

    name: str = ""
    """What to call it."""
    nodes: int = Field(default=1, gt=0)
    """Number of nodes."""
    instance: str | None = None
    """A cloud instance of the catalogue; fills in all that is not stated."""
    devices_per_node: int | None = Field(default=None, gt=0)
    """Devices in one node."""
    device: str | DeviceEntry | None = None
    """A device of the catalogue, or its figures."""
    inside: str | LinkEntry | None = None
    """The link between devices of a node: a name of the catalogue, or its figures."""
    between: str | LinkEntry | None = None
    """The link between nodes, per device: a name, or its figures."""
    host_memory_gb: float | None = Field(default=None, gt=0)
    """Host memory of a node."""
    storage_gb_per_s: float | None = Field(default=None, gt=0)
    """What one node can write to where checkpoints go."""
    price_per_node_hour: float | None = Field(default=None, ge=0)
    """Money per node and hour."""
    measured: dict[str, Any] | None = None
    """What `drivetrain probe` measured, in full; not read."""


def load_cluster(said: str) -> Cluster:
    """From a file, or `NAME:COUNT` of the catalogue: h100:64 (devices), p5.48xlarge:8 (nodes)."""
    is_file = _is_file(said)
    return cluster_from(read_cluster(said), name=Path(said).stem if is_file else said)


def read_cluster(said: str) -> ClusterFile:
    """The same as it was said, with nothing filled in."""
    if _is_file(said):
        return _read(Path(said))
    name, _, count = said.partition(":")
    known = catalogue()
    if count and not count.isdigit():
        raise _refused(said, "the count is no whole number", f"write {name}:8")
    number = int(count or 1)
    if name in known.instances:
        return ClusterFile(instance=name, nodes=number)
    if name in known.devices:
        per_node = min(8, number)
        if number % per_node:
            raise _refused(said, "devices come in nodes of 8", f"use {number // 8 * 8 + 8}")
        return ClusterFile(device=name, devices_per_node=per_node, nodes=number // per_node)
    names = [*known.devices, *known.instances]
    near = difflib.get_close_matches(name, names, n=1)
    remedy = f"did you mean {near[0]}?" if near else "give a cluster.yaml, or one of the catalogue"
    raise _refused(said, "neither a file nor a name of the catalogue", remedy)


def _is_file(said: str) -> bool:
    return said.endswith((".yaml", ".yml")) or Path(said).is_file()


def cluster_from(given: ClusterFile, name: str = "") -> Cluster:
    """Fill in from the catalogue what was not stated."""
    known = catalogue()
    if given.instance is not None:
        given = _with_instance(given, known)
    device = _device(given.device, known)
    inside = given.inside if given.inside is not None else device.inside
    between = given.between if given.between is not None else device.between
    return Cluster(
        num_nodes=given.nodes,
        devices_per_node=given.devices_per_node or 8,
        device_memory_bytes=device.memory_bytes,
        device=device.to_device(),
        inside=link_of(inside, known),
        between=link_of(between, known),
        host_memory_bytes=None if given.host_memory_gb is None else int(given.host_memory_gb * 1e9),
        host_link=Link(device.host_gb_per_s * 1e9),
        storage_bytes_per_s=None
        if given.storage_gb_per_s is None
        else given.storage_gb_per_s * 1e9,
        price_per_node_hour=given.price_per_node_hour,
        name=given.name or name,
    )


def _read(path: Path) -> ClusterFile:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        return ClusterFile.model_validate(document)
    except OSError as error:
        raise _refused(str(path), error.strerror or str(error), "give a file") from error
    except yaml.YAMLError as error:
        raise _refused(str(path), f"not YAML ({error})", "mend the YAML") from error
    except ValidationError as error:
        raise ConfigError([_explain(details) for details in error.errors()]) from error


def _explain(details: Any) -> Problem:
    where = "cluster." + ".".join(str(part) for part in details["loc"])
    if details["type"] == "extra_forbidden":
        key = str(details["loc"][-1])
        near = difflib.get_close_matches(key, ClusterFile.model_fields, n=1)
        remedy = f"did you mean {near[0]}?" if near else "leave it out"
        return Problem(where, "unknown key", remedy, details["input"])
    return Problem(where, details["msg"], "correct it, or leave it out", details["input"])


def _with_instance(given: ClusterFile, known: Catalogue) -> ClusterFile:
    if given.instance not in known.instances:
        near = difflib.get_close_matches(str(given.instance), known.instances, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"use {', '.join(known.instances)}"
        raise _refused(str(given.instance), "not in the catalogue", remedy, "cluster.instance")
    entry = known.instances[str(given.instance)]
    stated = given.model_dump(exclude_none=True, exclude={"instance"})
    return ClusterFile.model_validate({**entry.settings(), **stated})


def _device(said: str | DeviceEntry | None, known: Catalogue) -> DeviceEntry:
    if isinstance(said, DeviceEntry):
        return said
    if said is None or said not in known.devices:
        near = difflib.get_close_matches(str(said), known.devices, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"use {', '.join(known.devices)}"
        raise _refused(str(said), "not in the catalogue", remedy, "cluster.device")
    return known.devices[said]


def link_of(said: str | LinkEntry, known: Catalogue) -> Link:
    """By its figures, or by its name in the catalogue."""
    if isinstance(said, LinkEntry):
        return said.to_link()
    if said not in known.links:
        near = difflib.get_close_matches(said, known.links, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"use {', '.join(known.links)}"
        raise _refused(said, "no such link in the catalogue", remedy, "cluster.between")
    return known.links[said].to_link()


def _refused(value: str, rule: str, remedy: str, where: str = "--cluster") -> ConfigError:
    return ConfigError([Problem(where, rule, remedy, value)])


__all__ = [
    "ClusterFile",
    "Device",
    "cluster_from",
    "link_of",
    "load_cluster",
    "read_cluster",
]
