"""Judgements are pure: facts in, findings out; no host is needed to see each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.core.finding import EnvironmentFinding, together
from drivetrain.doctor.checks import judge
from drivetrain.doctor.checks.network import by_culprit
from drivetrain.doctor.examine import rounds
from drivetrain.doctor.facts import (
    Adapter,
    ClockOffset,
    Dial,
    Examination,
    Expected,
    HostDevice,
    HostFacts,
    HostLimits,
    HostLink,
    Interface,
    PortUse,
    StorageProbe,
    Timeouts,
)
from drivetrain.doctor.network import nccl_interface
from drivetrain.doctor.question import read_expected
from drivetrain.doctor.report import fabric_of, settings_for

GIB = 2**30
VERSIONS = {"python": "3.11.9", "drivetrain": "0.1", "torch": "2.13.0", "numpy": "2.4"}
H100 = HostDevice("NVIDIA H100 80GB HBM3", 81559, "570.86")


def host(number: int, **changes: object) -> HostFacts:
    address = f"10.0.0.{number}"
    facts = HostFacts(
        name=f"h{number}",
        versions=VERSIONS,
        devices=(),
        adapters=(),
        interfaces=(
            Interface("lo", "127.0.0.1", 65536, True, True),
            Interface("eth0", address, 1500, True, False),
        ),
        own_addresses=(address,),
        variables={},
        limits=HostLimits(65536, None, None),
        shm_total_bytes=8 * GIB,
        shm_free_bytes=8 * GIB,
        num_cores=8,
        memory_bytes=64 * GIB,
        memory_limit_bytes=None,
    )
    return dataclasses.replace(facts, **changes)  # type: ignore[arg-type]


def link(source: HostFacts, target: HostFacts, rate: float = 1e9, delay: float = 5e-5) -> HostLink:
    address = target.interfaces[1].address
    dials = (Dial("collective", address, 40000, None),)
    return HostLink(source.name, target.name, (address,), dials, delay, rate)


def site(*hosts: HostFacts, **more: object) -> Examination:
    links = tuple(link(a, b) for a in hosts for b in hosts if a is not b)
    clocks = tuple(ClockOffset(each.name, 0.0, 0.001) for each in hosts)
    return dataclasses.replace(Examination(hosts, links, clocks), **more)  # type: ignore[arg-type]


def seen(findings: Iterable[EnvironmentFinding]) -> list[tuple[str, tuple[str, ...]]]:
    return [(finding.check, finding.hosts) for finding in findings]


def test_three_good_hosts_have_nothing_to_complain_of() -> None:
    assert judge(site(host(1), host(2), host(3))) == []


def test_the_odd_version_out_is_named_with_what_the_others_have() -> None:
    odd = host(3, versions={**VERSIONS, "torch": "2.12.0"})
    (finding,) = judge(site(host(1), host(2), odd))
    assert (finding.check, finding.hosts, finding.severity) == ("versions", ("h3",), "error")
    assert "torch==2.13.0" in finding.fix


@pytest.mark.parametrize(
    ("versions", "devices", "words"),
    [
        ({"python": "3.11"}, (), "torch is missing"),
        ({"python": "3.11", "torch": "2.8.0"}, (), "too old"),
        ({"python": "3.11", "torch": "2.13.0"}, (H100,), "without CUDA"),
        (
            {"python": "3.11", "torch": "2.13.0", "cuda (of torch)": "13.0"},
            (H100,),
            "driver is too old",
        ),
    ],
)
def test_parts_that_do_not_fit(
    versions: dict[str, str], devices: tuple[HostDevice, ...], words: str
) -> None:
    (finding,) = judge(site(host(1, versions=versions, devices=devices)))
    assert words in finding.what


def test_a_driver_new_enough_is_fine() -> None:
    versions = {**VERSIONS, "cuda (of torch)": "12.8"}
    assert judge(site(host(1, versions=versions, devices=(H100,)))) == []


def test_hidden_devices_are_told_from_missing_ones() -> None:
    cuda = {**VERSIONS, "cuda (of torch)": "12.8"}
    whole = host(1, versions=cuda, devices=(H100,) * 8)
    hidden = host(
        2, versions=cuda, devices=(H100,) * 8, variables={"CUDA_VISIBLE_DEVICES": "0,1,9,2"}
    )
    (finding,) = judge(site(whole, hidden))
    assert finding.what.startswith("2 GPUs where 8")  # CUDA stops at the first that is not there
    assert "unset CUDA_VISIBLE_DEVICES" in finding.fix
    missing = host(2, versions=cuda, devices=(H100,) * 7)
    (finding,) = judge(site(whole, missing))
    assert "nvidia-smi" in finding.fix


def test_a_loopback_name_matters_between_hosts_only() -> None:
    laptop = host(1, own_addresses=("127.0.1.1",))
    assert judge(site(laptop)) == []
    assert ("names", ("h1",)) in seen(judge(site(laptop, host(2))))


def test_an_interface_that_is_not_there() -> None:
    wrong = host(2, variables={"GLOO_SOCKET_IFNAME": "ib0"})
    findings = judge(site(host(1), wrong, links=()))
    assert seen(findings) == [("interface", ("h2",))]
    assert "GLOO_SOCKET_IFNAME=eth0" in findings[0].fix


def test_a_slow_link_among_fast_ones() -> None:
    hosts = [host(n) for n in (1, 2, 3)]
    links = [link(a, b) for a in hosts for b in hosts if a is not b]
    links[0] = dataclasses.replace(links[0], bytes_per_s=1e8)
    (finding,) = judge(site(*hosts, links=tuple(links)))
    assert (finding.check, finding.hosts) == ("bandwidth", ("h1",))
    assert "sending to h2" in finding.what
    assert "0.80 Gbit/s measured" in finding.evidence


def test_slow_links_are_laid_at_the_door_of_the_host_they_share() -> None:
    to_h3 = [("h1", "h3"), ("h2", "h3"), ("h4", "h3")]
    assert list(by_culprit([*to_h3, ("h2", "h1")])) == [
        ("h3", False, ["h1", "h2", "h4"]),
        ("h2", True, ["h1"]),
    ]


def test_one_stream_is_not_held_against_a_very_fast_link() -> None:
    hosts = [host(1), host(2)]
    links = tuple(link(a, b, rate=1.2e9) for a in hosts for b in hosts if a is not b)
    expected = Expected(bytes_per_s=50e9)
    assert judge(site(*hosts, links=links, expected=expected)) == []


def test_latency_against_what_is_expected() -> None:
    hosts = [host(1), host(2)]
    links = tuple(link(a, b, delay=0.02) for a in hosts for b in hosts if a is not b)
    findings = judge(site(*hosts, links=links, expected=Expected(latency_s=5e-5)))
    assert {finding.check for finding in findings} == {"latency"}


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (Timeouts(stall_s=600), "--stall-timeout 600 ≥ parallel.timeout_s 600"),
        (Timeouts(slow_s=30), "--slow-timeout 30 < --stall-timeout 60"),
        (Timeouts(target_grace_s=30), "waits 30 s after SIGTERM"),
        (Timeouts(keep_alive_s=2), "= 2 s"),
    ],
)
def test_contradictory_time_outs(times: Timeouts, words: str) -> None:
    (finding,) = judge(site(host(1), timeouts=times))
    assert words in finding.evidence


def test_limits_grow_with_the_ranks() -> None:
    assert judge(site(host(1, limits=HostLimits(1024, None, None)))) == []
    cuda = {**VERSIONS, "cuda (of torch)": "12.8"}
    many = [
        host(n, versions=cuda, devices=(H100,) * 8, limits=HostLimits(1024, None, None))
        for n in range(1, 65)
    ]
    findings = together(judge(Examination(tuple(many))))
    assert [len(finding.hosts) for finding in findings] == [64]
    assert "512 ranks need 2048" in findings[0].evidence


def test_locked_memory_matters_where_there_is_rdma() -> None:
    limited = HostLimits(65536, 8 * 2**20, None)
    card = Adapter("mlx5_0", "infiniband", "400 Gb/sec", True)
    assert judge(site(host(1, limits=limited))) == []
    assert seen(judge(site(host(1, limits=limited, adapters=(card,))))) == [("limits", ("h1",))]


def test_scheduler_variables_that_differ_or_are_left_over() -> None:
    a = host(1, variables={"MASTER_ADDR": "h1"})
    b = host(2, variables={"MASTER_ADDR": "h9"})
    assert seen(judge(site(a, b, links=()))) == [("scheduler", ("h2",))]
    assert "unset RANK" in judge(site(host(1, variables={"RANK": "0"})))[0].fix


def test_the_cluster_file_says_what_to_expect(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("devices_per_node: 8\nbetween: {gb_per_s: 10, achieved: 0.5, latency_us: 30}\n")
    assert read_expected(str(path)) == Expected(5e9, 30 * 1e-6, 8)
    path.write_text("between: {gb_per_s: fast}\n")
    with pytest.raises(ConfigError, match="gb_per_s = fast: Input should be a valid number"):
        read_expected(str(path))
    path.write_text("between: ethernet-10\n")
    assert read_expected(str(path)) == Expected(0.9 * 1.25e9, 50 * 1e-6, None)
    path.write_text("between: ethernet-11\n")
    with pytest.raises(ConfigError, match="did you mean ethernet-10"):
        read_expected(str(path))


def test_the_catalogue_says_what_to_expect(tmp_path: Path) -> None:
    assert read_expected("p5.48xlarge:2").devices_per_node == 8
    assert read_expected("h100:4").devices_per_node == 4
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "device: {memory_gib: 8, peak_tflops: {fp32: 0.1}, memory_gb_per_s: 10, "
        "is_accelerator: false}\ndevices_per_node: 2\nbetween: ethernet-10\n"
    )
    assert read_expected(str(path)).devices_per_node is None  # ranks on processors are no devices


def test_a_directory_only_one_host_sees() -> None:
    findings = judge(site(host(1), host(2), sees_token={"h2": False}))
    assert seen(findings) == [("storage", ("h2",))]


def test_a_port_whose_holder_cannot_be_seen() -> None:
    (finding,) = judge(site(host(1, ports=(PortUse(29400, False),))))
    assert "ss -ltnp" in finding.fix


def test_little_room_is_a_warning() -> None:
    probe = StorageProbe("/runs", None, "", free_bytes=GIB, total_bytes=100 * GIB)
    (finding,) = judge(site(host(1, storage=(probe,))))
    assert finding.severity == "warning"


@pytest.mark.parametrize(
    ("adapter", "fabric", "names"),
    [
        (None, "ethernet", {"NCCL_IB_DISABLE", "NCCL_SOCKET_NTHREADS"}),
        (Adapter("mlx5_0", "infiniband", "400", True), "infiniband", {"NCCL_IB_HCA"}),
        (Adapter("mlx5_0", "infiniband", "400", False), "ethernet", {"NCCL_IB_DISABLE"}),
        (Adapter("mlx5_0", "roce", "100", True), "roce", {"NCCL_IB_HCA"}),
        (Adapter("rdmap0s6", "efa", "100", True), "efa", {"FI_PROVIDER", "NCCL_NET"}),
    ],
)
def test_settings_fit_the_fabric(adapter: Adapter | None, fabric: str, names: set[str]) -> None:
    facts = host(1, adapters=(adapter,) if adapter else ())
    assert fabric_of(facts) == fabric
    settings = {setting.name: setting for setting in settings_for(facts)}
    assert names | {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} <= set(settings)
    assert all(setting.reason for setting in settings.values())


def test_nccl_reads_its_variable_in_its_own_way() -> None:
    found = (
        Interface("lo", "127.0.0.1", 65536, True, True),
        Interface("docker0", "172.17.0.1", 1500, True, False),
        Interface("eth0", "10.0.0.1", 1500, True, False),
        Interface("eth01", "10.0.1.1", 1500, True, False),
        Interface("ib0", "10.1.0.1", 2044, False, False),
    )
    assert nccl_interface({}, found) == "eth0"
    assert nccl_interface({"NCCL_SOCKET_IFNAME": "^lo,docker,eth0"}, found) is None
    assert nccl_interface({"NCCL_SOCKET_IFNAME": "=eth01"}, found) == "eth01"
    assert nccl_interface({"NCCL_SOCKET_IFNAME": "docker"}, found) == "docker0"


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 13])
def test_every_pair_meets_once_and_nobody_twice_in_a_round(count: int) -> None:
    plan = rounds(range(count))
    for pairs in plan:
        members = [member for pair in pairs for member in pair]
        assert len(members) == len(set(members))
    met = [frozenset(pair) for pairs in plan for pair in pairs]
    assert len(met) == len(set(met)) == count * (count - 1) // 2


def test_many_hosts_meet_a_bounded_number_of_others() -> None:
    plan = rounds(range(1000))
    assert len(plan) == 63
    assert all(len(pairs) == 500 for pairs in plan)
