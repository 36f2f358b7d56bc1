"""Facts: what a host and the way between two hosts look like, as values that travel as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar


@dataclass(frozen=True)
class Interface:
    """A network interface with its IPv4 address."""

    name: str
    address: str
    mtu: int
    is_up: bool
    is_loopback: bool


@dataclass(frozen=True)
class Adapter:
    """What carries collectives past the kernel: InfiniBand, RoCE (over Ethernet) or AWS's EFA."""

    name: str
    kind: str
    rate: str
    is_up: bool


@dataclass(frozen=True)
class HostDevice:
    """A GPU, as its driver describes it."""

    name: str
    memory_mib: int
    driver: str


@dataclass(frozen=True)
class PortUse:
    """A port the run wants; held by another process if `pid` is not None."""

    port: int
    is_free: bool
    pid: int | None = None
    command: str = ""
    age_s: float | None = None
    is_orphan: bool = False


@dataclass(frozen=True)
class HostLimits:
    """What the system lets one process have; None where there is no limit."""

    open_files: int | None
    locked_memory_bytes: int | None
    processes: int | None


@dataclass(frozen=True)
class StorageProbe:
    """A place that was written to, read back, renamed in and cleaned up again."""

    address: str
    failed_at: str | None
    """The act that failed, None when all went well."""
    error: str = ""
    free_bytes: int | None = None
    total_bytes: int | None = None
    write_bytes_per_s: float | None = None


@dataclass(frozen=True)
class HostFacts:
    """Everything one host says about itself."""

    name: str
    versions: dict[str, str]
    devices: tuple[HostDevice, ...]
    adapters: tuple[Adapter, ...]
    interfaces: tuple[Interface, ...]
    own_addresses: tuple[str, ...]
    """What the host's own name resolves to, in order; empty when it does not."""
    variables: dict[str, str]
    """Environment variables that steer a run; what looks secret has been taken out."""
    limits: HostLimits
    shm_total_bytes: int | None
    shm_free_bytes: int | None
    num_cores: int
    memory_bytes: int | None
    memory_limit_bytes: int | None
    ports: tuple[PortUse, ...] = ()
    storage: tuple[StorageProbe, ...] = ()
    modules: tuple[str, ...] = ()
    """Kernel modules that matter to GPUs' traffic."""


@dataclass(frozen=True)
class ClockOffset:
    """A host's clock against the client's; the truth is within `uncertainty_s` of `offset_s`."""

    host: str
    offset_s: float
    uncertainty_s: float


@dataclass(frozen=True)
class Dial:
    """One attempt to connect: to what end, where, and what came of it."""

    purpose: str
    """port: one the run was told to use. collective: a free port, as gloo and NCCL use."""
    address: str
    port: int
    error: str | None
    """None: connected. silent: no answer. refused, unreachable: as the system says it."""


@dataclass(frozen=True)
class HostLink:
    """The way from one host to another."""

    source: str
    target: str
    resolved: tuple[str, ...]
    """What the target's name resolves to at the source."""
    dials: tuple[Dial, ...] = ()
    latency_s: float | None = None
    bytes_per_s: float | None = None


@dataclass(frozen=True)
class Expected:
    """What the cluster should be like; None where nobody has said."""

    bytes_per_s: float | None = None
    latency_s: float | None = None
    devices_per_node: int | None = None


@dataclass(frozen=True)
class Timeouts:
    """The time-outs one run will have, each under the name its user knows."""

    collective_s: float = 600.0
    stall_s: float = 60.0
    slow_s: float = 900.0
    grace_s: float = 30.0
    keep_alive_s: float | None = None
    """torchelastic's: how long a silent node counts as alive; None: its default."""
    target_grace_s: float | None = None
    """How long the scheduler waits between SIGTERM and SIGKILL; None: not known."""


@dataclass(frozen=True)
class Examination:
    """All that was found out, before it is judged."""

    hosts: tuple[HostFacts, ...]
    links: tuple[HostLink, ...] = ()
    clocks: tuple[ClockOffset, ...] = ()
    expected: Expected = Expected()
    timeouts: Timeouts = Timeouts()
    target: str | None = None
    sees_token: dict[str, bool] = field(default_factory=dict)
    """Whether each host sees a file that the first one wrote into the run's directory."""


# What most hosts have, and who differs.

Value = TypeVar("Value")


def odd_ones(values: Mapping[str, Value]) -> tuple[Value, dict[str, Value]] | None:
    """The commonest value (of equals, the first) and the hosts with another; None if alike."""
    if len(set(values.values())) < 2:
        return None
    usual = Counter(values.values()).most_common(1)[0][0]
    return usual, {host: value for host, value in values.items() if value != usual}
