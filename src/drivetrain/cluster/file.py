"""cluster.yaml: its keys, and how the catalogue or a probe fills them in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from pydantic import Field, ValidationError

from drivetrain.cluster.catalogue import Catalogue, DeviceEntry, LinkEntry, catalogue
from drivetrain.cluster.description import Cluster, Device, Link
from drivetrain.cluster.exchange import link_entry
from drivetrain.core import set_once
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.hints import nearest
from drivetrain.core.memory import usable_bytes
from drivetrain.core.section import Section

# cluster.yaml describes a cluster; names from the catalogue are filled in.
#
#     instance: p5.48xlarge        # or set device, devices_per_node, inside, between … yourself
#     nodes: 8
#
# Values in the file take precedence over the catalogue's.


DEFAULT = "cluster.yaml"
"""The file that is read if no cluster is named, and that `drivetrain probe` writes."""


class ClusterFile(Section):
    """The file, as written."""

    name: str = ""
    """Name of the cluster."""
    nodes: int = Field(default=1, gt=0)
    """Number of nodes."""
    instance: str | None = None
    """A cloud instance from the catalogue; it fills in all keys that are not set."""
    devices_per_node: int | None = Field(default=None, gt=0)
    """Devices in one node."""
    device: str | DeviceEntry | None = None
    """A device from the catalogue, or its figures."""
    inside: str | LinkEntry | None = None
    """The link between devices of a node: a name from the catalogue, or its figures."""
    between: str | LinkEntry | None = None
    """The link between nodes, per device: a name from the catalogue, or its figures."""
    host_memory_gb: float | None = Field(default=None, gt=0)
    """Host memory of a node."""
    storage_gb_per_s: float | None = Field(default=None, gt=0)
    """Bandwidth of one node to the storage of checkpoints."""
    price_per_node_hour: float | None = Field(default=None, ge=0)
    """Price per node and hour."""
    measured: dict[str, Any] | None = None
    """All measurements of `drivetrain probe`; not read back."""


def load_cluster(said: str) -> Cluster:
    """Load a file, or `NAME:COUNT` of the catalogue: h100:64 (devices), p5.48xlarge:8 (nodes)."""
    is_file = _is_file(said)
    return cluster_from(read_cluster(said), name=Path(said).stem if is_file else said)


def read_cluster(said: str) -> ClusterFile:
    """Read the same without filling anything in from the catalogue."""
    if _is_file(said):
        return _read(Path(said))
    name, _, count = said.partition(":")
    known = catalogue()
    if count and not count.isdigit():
        raise _refused(said, "the count is not a whole number", f"write {name}:8")
    number = int(count or 1)
    names = [*known.devices, *known.instances]
    name = next((each for each in names if each.lower() == name.lower()), name)
    if name in known.instances:
        return ClusterFile(instance=name, nodes=number)
    if name in known.devices:
        per_node = min(8, number)
        if number % per_node:
            raise _refused(said, "devices come in nodes of 8", f"use {number // 8 * 8 + 8}")
        return ClusterFile(device=name, devices_per_node=per_node, nodes=number // per_node)
    near = _with_count(said, names) or nearest(name, names)
    remedy = f"did you mean {near}?" if near else "give a cluster.yaml or a name from the catalogue"
    raise _refused(said, "neither a file nor a name from the catalogue", remedy)


def _with_count(said: str, names: Sequence[str]) -> str | None:
    """`h100x8` → `h100:8`: a name and a count that are joined in another way."""
    name, _, count = said.lower().replace("*", "x").rpartition("x")
    known = next((each for each in names if each.lower() == name), None)
    return f"{known}:{count}" if known and count.isdigit() else None


def _is_file(said: str) -> bool:
    return said.endswith((".yaml", ".yml")) or Path(said).is_file()


def cluster_from(given: ClusterFile, name: str = "") -> Cluster:
    """Fill in missing values from the catalogue."""
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
        text = path.read_text(encoding="utf-8")
        document = yaml.load(text, set_once.SafeLoader) or {}  # noqa: S506 - a SafeLoader
        return ClusterFile.model_validate(document)
    except FileNotFoundError as error:
        if str(path) == DEFAULT:
            rule = f"no cluster was given, and there is no {DEFAULT} in this directory"
            remedy = (
                "name the hardware, as in --cluster h100:8, or measure this machine: drivetrain "
                "probe"
            )
            problem = Problem("--cluster", rule, remedy, has_value=False)
            raise ConfigError([problem]) from error
        remedy = (
            "name the hardware, as in --cluster h100:8, or measure this machine: "
            f"drivetrain probe --output {path}"
        )
        raise _refused(str(path), "no such file", remedy) from error
    except OSError as error:
        raise _refused(str(path), error.strerror or str(error), "give a file") from error
    except set_once.SetTwice as error:
        raise _refused(str(path), str(error), set_once.REMEDY) from error
    except yaml.YAMLError as error:
        raise _refused(str(path), f"not YAML ({error})", "fix the YAML") from error
    except ValidationError as error:
        raise ConfigError([_explain(details) for details in error.errors()]) from error


def _explain(details: Any) -> Problem:
    where = "cluster." + ".".join(str(part) for part in details["loc"])
    if details["type"] == "extra_forbidden":
        key = str(details["loc"][-1])
        near = nearest(key, ClusterFile.model_fields)
        remedy = f"did you mean {near}?" if near else "leave it out"
        return Problem(where, "unknown key", remedy, details["input"])
    return Problem(where, details["msg"], "correct it, or leave it out", details["input"])


def _with_instance(given: ClusterFile, known: Catalogue) -> ClusterFile:
    if given.instance not in known.instances:
        near = nearest(str(given.instance), known.instances)
        remedy = f"did you mean {near}?" if near else f"use {', '.join(known.instances)}"
        raise _refused(str(given.instance), "not in the catalogue", remedy, "cluster.instance")
    entry = known.instances[str(given.instance)]
    stated = given.model_dump(exclude_none=True, exclude={"instance"})
    return ClusterFile.model_validate({**entry.settings(), **stated})


def _device(said: str | DeviceEntry | None, known: Catalogue) -> DeviceEntry:
    if isinstance(said, DeviceEntry):
        return said
    if said is None or said not in known.devices:
        near = nearest(str(said), known.devices)
        remedy = f"did you mean {near}?" if near else f"use {', '.join(known.devices)}"
        raise _refused(str(said), "not in the catalogue", remedy, "cluster.device")
    return known.devices[said]


def link_of(said: str | LinkEntry, known: Catalogue) -> Link:
    """Return a link from its figures, or by its name in the catalogue."""
    if isinstance(said, LinkEntry):
        return said.to_link()
    if said not in known.links:
        near = nearest(said, known.links)
        remedy = f"did you mean {near}?" if near else f"use {', '.join(known.links)}"
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


# Conversion of a probe's measurements to a cluster file.


def cluster_file(found: Mapping[str, Any]) -> ClusterFile:
    """Return a cluster file with measured figures; `achieved` is therefore 1."""
    per_node = int(found["ranks_per_node"])
    is_host = found["device"] == "cpu"
    rates = {name: _large(products) for name, products in found["products"].items()}
    small = _small(found["products"]["fp32"])
    host_bytes = usable_bytes()
    memory = found.get("memory_bytes") or (host_bytes or 0) / per_node
    device = DeviceEntry(
        name=str(found["device"]),
        memory_gib=memory / 2**30,
        peak_tflops={name: rate / 1e12 for name, rate in rates.items()},
        achieved=1.0,
        memory_gb_per_s=found["memory_bytes_per_s"] / 1e9,
        memory_achieved=1.0,
        operation_us=found["operation_s"] * 1e6,
        overlap=0.0 if is_host else 0.9,
        is_accelerator=not is_host,
        small_product_gflop=small / 1e9,
        attention_tflops={n: rate / 1e12 for n, rate in found["attention_flops"].items()},
        curved_gb_per_s=found["curved_bytes_per_s"] / 1e9,
        shared_product_us=found["exchange_overheads"]["tp"] * 1e6,
        sharded_unit_us=found["exchange_overheads"]["fsdp"] * 1e6,
        source="drivetrain probe",
    )
    links = _measured(found["exchange"], "drivetrain probe")
    # with one rank per node, or one node, only one link is measured; assume the other equals it
    any_link = next(iter(links.values()), LinkEntry(gb_per_s=10.0, source="not measured: one rank"))
    return ClusterFile(
        name="probed",
        nodes=max(1, int(found["ranks"]) // per_node),
        devices_per_node=per_node,
        device=device,
        inside=links.get("inside", any_link),
        between=links.get("between", any_link),
        host_memory_gb=None if host_bytes is None else host_bytes / 1e9,
        storage_gb_per_s=found["storage_bytes_per_s"] / 1e9,
        measured=dict(found),
    )


def to_yaml(file: ClusterFile, written_by: str = "drivetrain probe") -> str:
    """Return the file's text, which can be read back."""
    document = _rounded(file.model_dump(mode="json", exclude_unset=True, exclude_none=True))
    return f"# written by `{written_by}`\n" + str(yaml.safe_dump(document, sort_keys=False))


def write_links(path: Path, exchange: Mapping[str, Any], nodes: int, per_node: int) -> bool:
    """Write measured links to a cluster file, which is created if it does not exist.

    Return False, and write nothing, if too little was measured for a fit.
    """
    by = "drivetrain bench collectives"
    links = _measured(exchange, by)
    if not links:
        return False
    given = _read(path) if path.exists() else ClusterFile(nodes=nodes, devices_per_node=per_node)
    path.write_text(to_yaml(given.model_copy(update=links), by), encoding="utf-8")
    return True


def _rounded(value: Any) -> Any:
    """Round to four digits, more than a measurement's accuracy."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _least_large_side(products: Mapping[Any, float]) -> float:
    """Return the side from which products count as large; larger for accelerators than hosts."""
    return max(map(int, products)) / 4


def _large(products: Mapping[Any, float]) -> float:
    """Return the median rate of large products; a single one may have had the machine to itself."""
    least = _least_large_side(products)
    return median(rate for side, rate in products.items() if int(side) >= least)


def _small(products: Mapping[Any, float]) -> float:
    """Return the size at which a product reaches half the best rate: best · f / (f + small).

    Only small products are used: a large one that is slower than others has other causes.
    """
    best, least = _large(products), _least_large_side(products)
    wanted = [
        2.0 * float(side) ** 3 * max(0.0, best / rate - 1.0)
        for side, rate in products.items()
        if int(side) < least
    ]
    return median(wanted) if wanted else 0.0


def _measured(exchange: Mapping[str, Any], source: str) -> dict[str, LinkEntry]:
    """Return the links `inside` and `between`, as far as there is enough data for a fit."""
    found = {
        where: link_entry(_by_number(one["seconds"]), int(one["ranks"]), source)
        for where, one in exchange.items()
    }
    return {where: link for where, link in found.items() if link is not None}


def _by_number(seconds: Mapping[str, Mapping[Any, float]]) -> dict[str, dict[int, float]]:
    """Convert keys to numbers; JSON keys are text."""
    return {kind: {int(n): s for n, s in sizes.items()} for kind, sizes in seconds.items()}
