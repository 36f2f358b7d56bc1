"""nccl-tests' figures by hand, exact patterns, the fit that `plan` reads, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.links.collectives import quiet_ratio
from drivetrain.cli.bench import TypedCollectives, request_of
from drivetrain.cluster.exchange import PLANNED, fit, link_entry, passes
from drivetrain.cluster.file import load_cluster, write_links
from drivetrain.collectives.patterns import DTYPES, Pattern, count_wrong, pieces, write
from drivetrain.collectives.request import (
    OPERATIONS,
    CallTimes,
    CollectivesRequest,
    Measured,
    RankSet,
    Row,
    element_count,
    exchange_of,
    rank_sets,
    sizes_from,
)
from drivetrain.collectives.show import heading, line, part_of_line, plot, summary
from drivetrain.core.errors import ConfigError
from drivetrain.plan.cost.timing import Ring

# one millisecond a call, 1 MiB of floats on 4 ranks: (count, algbw, busbw) as nccl-tests' sources
# have them (AllReduceGetBw, AllGatherGetBw …)
MIB, GB = 1 << 20, 1.048576
BY_HAND = {
    "all_reduce": (MIB // 4, GB, GB * 1.5),
    "all_gather": (MIB // 16, GB, GB * 0.75),
    "reduce_scatter": (MIB // 16, GB, GB * 0.75),
    "broadcast": (MIB // 4, GB, GB),
    "all_to_all": (MIB // 16, GB, GB * 0.75),
    "reduce": (MIB // 4, GB, GB),
    "gather": (MIB // 16, GB, GB * 0.75),
    "scatter": (MIB // 16, GB, GB * 0.75),
    "send_recv": (MIB // 4, GB, GB),
}


def times(seconds: float = 1e-3, wrong: int | None = 0) -> CallTimes:
    return CallTimes(seconds, seconds, 2 * seconds, 3, 1.25 * seconds, 20, wrong)


def row(operation: str, count: int, seconds: float = 1e-3, ranks: int = 4) -> Row:
    return Row(operation, count, "float", "none", -1, ranks, times(seconds), None)


def test_every_operation_is_there() -> None:
    assert set(OPERATIONS) == {*BY_HAND, "barrier"}


@pytest.mark.parametrize("operation", BY_HAND)
def test_rates_are_those_of_nccl_tests(operation: str) -> None:
    count, algbw, busbw = BY_HAND[operation]
    assert element_count(operation, MIB, "float", 4) == count
    made = row(operation, count)
    assert made.num_bytes == MIB
    assert made.algbw(made.timed) / 1e9 == pytest.approx(algbw)
    assert made.busbw(made.timed) / 1e9 == pytest.approx(busbw)


def test_parts_are_multiples_of_16_bytes_as_nccl_tests_cuts_them() -> None:
    assert element_count("all_gather", 100, "float", 3) == 8
    assert element_count("all_gather", 40, "float", 3) == 0
    assert element_count("all_gather", 100, "half", 3) == 16
    assert element_count("all_reduce", 40, "float", 3) == 10


def test_an_unknown_operation_has_no_rate() -> None:
    with pytest.raises(KeyError):
        passes("all_magic", 4)


_TORCHS = {"sum": "add", "min": "minimum", "max": "maximum"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("redop", ["sum", "min", "max"])
def test_what_ranks_hold_reduces_exactly_to_what_is_expected(dtype: str, redop: str) -> None:
    ranks, count = 8, 1000
    pattern = Pattern(dtype, ranks, redop, repetition=1)
    held = []
    for rank in range(ranks):
        tensor = torch.zeros(count, dtype=DTYPES[dtype])
        write(tensor, (pattern.of_rank(rank, index) for index in pieces(count)))
        held.append(tensor)
    reduce: Callable[..., torch.Tensor] = getattr(torch, _TORCHS[redop])
    found = held[0].clone()
    for tensor in held[1:]:  # one after another, in the type itself, as a ring adds them
        found = reduce(found, tensor)
    expected = [pattern.reduced(index) for index in pieces(count)]
    assert count_wrong(found, expected) == 0
    found[7] += 1
    assert count_wrong(found, expected) == 1
    if dtype not in ("int8", "uint8", "bfloat16"):  # their primes are small
        assert count_wrong(found.roll(64), expected) > 0.9 * count


def test_a_type_too_small_for_its_sums_is_refused() -> None:
    with pytest.raises(ConfigError, match="--dtype = bfloat16: cannot hold sums over 200 ranks"):
        Pattern("bfloat16", 200, "sum")
    Pattern("bfloat16", 200, "max")


def test_sets_of_ranks() -> None:
    axes = {"tp": [(0, 1), (2, 3)]}
    assert [one.name for one in rank_sets([0, 0, 0, 0], axes)] == ["world", "axis tp"]
    assert [one.name for one in rank_sets([0, 1], {})] == ["world"]
    world, inside, between = rank_sets([0, 0, 1, 1], {})
    assert inside.groups == ((0, 1), (2, 3))
    assert between.groups == ((0, 2), (1, 3))
    node_of = [0, 0, 1, 1]
    assert [one.rings_per_link(node_of) for one in (world, inside, between)] == [1, 0, 2]


def test_the_line_rate_is_shared_by_the_rings_that_cross_it() -> None:
    made = row("all_reduce", MIB // 4, ranks=2)  # 1.05 GB/s over the link in one ring
    assert part_of_line(made, 10.48576e9, rings=1) == pytest.approx(0.1)
    assert part_of_line(made, 10.48576e9, rings=2) == pytest.approx(0.2)
    assert line(made, 10.48576e9, 2).endswith(" 20.0")
    assert line(made, 10.48576e9, 0).endswith(" N/A")


def test_columns_stand_as_in_nccl_tests() -> None:
    *_, names, _units = heading(RankSet("world", ((0, 1, 2, 3),)), False, "all_gather")
    wanted = "size count type redop root time algbw busbw #wrong time algbw busbw #wrong"
    assert names.split()[1:14] == wanted.split()
    made = replace(row("all_gather", 65536), in_place=times(2e-3, wrong=17))
    words = line(made, None, 1).split()
    assert words[:5] == ["1048576", "65536", "float", "none", "-1"]
    assert words[5:13] == ["1000.00", "1.05", "0.79", "0", "2000.00", "0.52", "0.39", "17"]
    assert words[13:17] == ["1000.00", "2000.00", "3", "(1.25x)"]
    # a parser that goes by nccl-tests' widths finds them, too
    text = line(made, None, 1)
    assert text[:12].strip() == "1048576"
    assert text[52:61].strip() == "1000.00"


def test_wrong_elements_are_in_the_last_lines() -> None:
    world = RankSet("world", ((0, 1, 2, 3),))
    bad = replace(row("broadcast", 8), in_place=times(wrong=3))
    lines = list(summary([Measured(world, (row("broadcast", 4), bad))]))
    assert lines[0] == "# Out of bounds values : 3 FAILED"
    assert "OK" in next(iter(summary([Measured(world, (row("broadcast", 4),))])))


def test_plan_reads_the_links_that_were_measured(tmp_path: Path) -> None:
    """On two nodes of two: inside ten times as fast as between."""
    sets = []
    for ranks in rank_sets([0, 0, 1, 1], {}):
        per_byte = 1e-10 if ranks.name == "inside a node" else 1e-9
        rows = [
            row(kind, count, 2e-5 + per_byte * count * 4 * whole, ranks.num_ranks)
            for kind in PLANNED
            for count in (1 << 10, 1 << 16, 1 << 20)
            for whole in [1 if kind == "all_reduce" else ranks.num_ranks]
        ]
        sets.append(Measured(ranks, tuple(rows)))
    file = tmp_path / "cluster.yaml"
    file.write_text("device: h100\nnodes: 2\ndevices_per_node: 2\n")
    assert write_links(file, exchange_of(sets, 2), 2, 2)
    cluster = load_cluster(str(file))
    assert cluster.device is not None
    assert cluster.device.name == load_cluster("h100:8").device.name  # type: ignore[union-attr]
    assert cluster.inside is not None
    assert cluster.between is not None
    for kind in PLANNED:
        inside = Ring(2, cluster.inside).seconds(kind, 1 << 20)
        assert inside == pytest.approx(2e-5 + (1 << 20) * 1e-10, rel=0.01)
        between = Ring(2, cluster.between).seconds(kind, 1 << 20)
        assert between == pytest.approx(2e-5 + (1 << 20) * 1e-9, rel=0.01)


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row("all_reduce", 4**k, 1e-5 + 4**k * 4e-9, 2) for k in (4, 6, 8)]
    rows.append(row("barrier", 0, ranks=2))
    sets = [Measured(each, tuple(rows)) for each in rank_sets([0, 0, 1, 1], {})]
    plot(sets, "two nodes", 1e9, tmp_path / "found.png")
    assert (tmp_path / "found.png").stat().st_size > 10_000


def test_one_rank_per_node_leaves_the_link_inside_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("device: h100\nnodes: 2\ninside: {gb_per_s: 450}\n")
    world = rank_sets([0, 1], {})[0]
    rows = tuple(row("all_reduce", 4**k, 1e-5 + 4**k * 4e-9, 2) for k in (4, 6, 8))
    assert write_links(file, exchange_of([Measured(world, rows)], 2), 2, 1)
    cluster = load_cluster(str(file))
    assert cluster.inside is not None
    assert cluster.inside.bytes_per_s == 450e9
    assert cluster.between is not None
    assert cluster.between.bytes_per_s == pytest.approx(1e9, rel=0.01)


def test_too_little_for_a_fit_writes_nothing(tmp_path: Path) -> None:
    world = rank_sets([0, 0], {})[0]
    found = exchange_of([Measured(world, (row("all_reduce", 64, ranks=2),))], 1)
    assert not write_links(tmp_path / "cluster.yaml", found, 1, 2)
    assert list(tmp_path.iterdir()) == []
    assert link_entry({"broadcast": {8: 1e-3, 64: 2e-3}}, 2, "") is None


def test_the_fit_says_how_far_off_it_is() -> None:
    straight = {size: 1e-4 + size * 1e-9 for size in (8, 1 << 10, 1 << 20, 1 << 22)}
    assert fit("all_reduce", straight, 4).error(straight) < 1e-6
    bent = {**straight, 1 << 10: 1e-2, 8: 1e-2}
    assert fit("all_reduce", bent, 4).error(bent) > 0.1


TYPED = TypedCollectives(
    "all", "8", "64MB", 4, "float", "sum", "", None, None, None, None, None, None
)


def test_the_request_survives_its_way_to_the_ranks() -> None:
    typed = replace(TYPED, axes="tp=2,dp_shard=-1", line_rate="10Gbit", json_file="found.json")
    asked = request_of(typed)
    assert CollectivesRequest.from_json(asked.to_json()) == asked
    assert asked.line_rate_bytes_per_s == 1.25e9
    assert asked.sizes[:3] == (8, 32, 128)
    assert asked.sizes[-1] == 1 << 25  # the next would be more than 64 MB
    assert Path(str(asked.json_file)).is_absolute()
    assert request_of(replace(TYPED, line_rate="1.25GB/s")).line_rate_bytes_per_s == 1.25e9
    assert sizes_from(8, 8, 2) == (8,)


def test_every_mistake_is_named_at_once() -> None:
    wrong = TypedCollectives(
        "all_magic", "2", "1", 1, "float", "mean", "xp=2", 0, None, "fast", None, None, None
    )
    with pytest.raises(ConfigError) as refused:
        request_of(wrong)
    flags = [problem.where for problem in refused.value.problems]
    wanted = "--ops --redop --min-bytes --max-bytes --factor --iters --axes --line-rate"
    assert flags == wanted.split()


def test_calls_that_were_held_up_do_not_count() -> None:
    """A call in two is ten times as long, on either side; ours takes a tenth longer."""
    plain = [1.0, 10.0] * 50
    ours = [11.0, 1.1] * 50
    found = quiet_ratio(ours, plain)
    assert found.value == pytest.approx(1.1)
    assert found.low == found.high == pytest.approx(1.1)
