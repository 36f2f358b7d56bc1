"""Facts about a host and about a link between two hosts, as values that are sent as JSON."""

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
    """A network adapter that bypasses the kernel: InfiniBand, RoCE (over Ethernet) or AWS EFA."""

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
    """A port the run needs; `pid` is the process that holds it, if known."""

    port: int
    is_free: bool
    pid: int | None = None
    command: str = ""
    age_s: float | None = None
    is_orphan: bool = False


@dataclass(frozen=True)
class HostLimits:
    """Resource limits of one process; None where there is no limit."""

    open_files: int | None
    locked_memory_bytes: int | None
    processes: int | None


@dataclass(frozen=True)
class StorageProbe:
    """The result of writing, reading back, renaming and deleting a file in one place."""

    address: str
    failed_at: str | None
    """The operation that failed; None if all succeeded."""
    error: str = ""
    free_bytes: int | None = None
    total_bytes: int | None = None
    write_bytes_per_s: float | None = None


@dataclass(frozen=True)
class HostFacts:
    """Everything one host reports about itself."""

    name: str
    versions: dict[str, str]
    devices: tuple[HostDevice, ...]
    adapters: tuple[Adapter, ...]
    interfaces: tuple[Interface, ...]
    own_addresses: tuple[str, ...]
    """What the host's own name resolves to, in order; empty if it does not resolve."""
    variables: dict[str, str]
    """Environment variables that affect a run, with secrets removed."""
    limits: HostLimits
    shm_total_bytes: int | None
    shm_free_bytes: int | None
    num_cores: int
    memory_bytes: int | None
    memory_limit_bytes: int | None
    ports: tuple[PortUse, ...] = ()
    storage: tuple[StorageProbe, ...] = ()
    modules: tuple[str, ...] = ()
    """Kernel modules that are relevant for GPU traffic."""


@dataclass(frozen=True)
class ClockOffset:
    """A host's clock relative to the client's: `offset_s` ± `uncertainty_s`."""

    host: str
    offset_s: float
    uncertainty_s: float


@dataclass(frozen=True)
class Dial:
    """One attempt to connect: its purpose, address and result."""

    purpose: str
    """port: one that the run will use. collective: any free port, as gloo and NCCL use."""
    address: str
    port: int
    error: str | None
    """None: connected. silent: no response. refused, unreachable: as the system reports it."""


@dataclass(frozen=True)
class HostLink:
    """The network path from one host to another."""

    source: str
    target: str
    resolved: tuple[str, ...]
    """What the target's name resolves to at the source."""
    dials: tuple[Dial, ...] = ()
    latency_s: float | None = None
    bytes_per_s: float | None = None


@dataclass(frozen=True)
class Expected:
    """What the cluster should provide; None where not specified."""

    bytes_per_s: float | None = None
    latency_s: float | None = None
    devices_per_node: int | None = None


@dataclass(frozen=True)
class Timeouts:
    """The timeouts of one run, under the names that its user knows."""

    collective_s: float = 600.0
    stall_s: float = 60.0
    slow_s: float = 900.0
    grace_s: float = 30.0
    keep_alive_s: float | None = None
    """torchelastic's keep-alive: how long a silent node counts as alive; None: its default."""
    target_grace_s: float | None = None
    """How long the scheduler waits between SIGTERM and SIGKILL; None: unknown."""


@dataclass(frozen=True)
class Examination:
    """Everything that was gathered, before it is judged."""

    hosts: tuple[HostFacts, ...]
    links: tuple[HostLink, ...] = ()
    clocks: tuple[ClockOffset, ...] = ()
    expected: Expected = Expected()
    timeouts: Timeouts = Timeouts()
    target: str | None = None
    sees_token: dict[str, bool] = field(default_factory=dict)
    """Whether each host sees a file that the first one wrote into the run directory."""


# What most hosts have, and which ones differ.

Value = TypeVar("Value")


def odd_ones(values: Mapping[str, Value]) -> tuple[Value, dict[str, Value]] | None:
    """Return the commonest value (the first, if tied) and the hosts that differ; None if alike."""
    if len(set(values.values())) < 2:
        return None
    usual = Counter(values.values()).most_common(1)[0][0]
    return usual, {host: value for host, value in values.items() if value != usual}
