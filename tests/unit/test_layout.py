from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.core.errors import LayoutError
from drivetrain.parallel.layout import AXES, FREE, Coordinates, Layout


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout of up to 65,536 ranks."""
    bits = draw(st.integers(0, 16))
    sizes = [1] * 5
    for _ in range(bits):
        sizes[draw(st.integers(0, 4))] *= 2
    if draw(st.booleans()) and math.prod(sizes) * 3 <= 65_536:
        sizes[draw(st.integers(0, 4))] *= 3
    return Layout(*sizes)


@given(layouts(), st.data())
def test_rank_and_coordinates_undo_each_other(layout: Layout, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    assert layout.rank(layout.coordinates(rank)) == rank


@given(layouts(), st.sets(st.sampled_from(AXES)), st.data())
def test_a_group_is_the_same_seen_from_each_member(
    layout: Layout, axes: set[str], data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    group = layout.group(rank, *axes)
    assert rank in group
    assert len(group) == math.prod(s for a, s in zip(AXES, layout.sizes, strict=True) if a in axes)
    other = data.draw(st.sampled_from(group))
    assert layout.group(other, *axes) == group


@given(layouts().filter(lambda layout: layout.world_size <= 2048), st.sampled_from(AXES))
def test_groups_along_an_axis_partition_the_world(layout: Layout, axis: str) -> None:
    ranks = [rank for group in layout.groups(axis) for rank in group]
    assert sorted(ranks) == list(range(layout.world_size))


@given(layouts(), st.sampled_from(AXES))
def test_the_free_axis_takes_what_is_left(layout: Layout, axis: str) -> None:
    sizes = dict(zip(AXES, layout.sizes, strict=True))
    assert Layout.resolve(layout.world_size, **{**sizes, axis: FREE}) == layout


@given(layouts(), st.data())
def test_every_sample_slice_has_exactly_its_model_parallel_ranks(
    layout: Layout, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    assert 0 <= layout.dp_index(rank) < layout.dp
    group = layout.group(rank, "dp_replicate", "dp_shard")
    assert [layout.dp_index(r) for r in group] == list(range(layout.dp))


def test_tensor_neighbours_are_adjacent_and_pipeline_stages_far_apart() -> None:
    layout = Layout(pp=2, dp_shard=2, tp=4)
    assert layout.group(0, "tp") == (0, 1, 2, 3)
    assert layout.group(0, "pp") == (0, 8)
    assert layout.coordinates(13) == Coordinates(pp=1, dp_shard=1, tp=1)
    assert str(layout) == "pp=2 × dp_shard=2 × tp=4"


@pytest.mark.parametrize(
    ("world_size", "sizes", "message"),
    [
        (6, {"dp_shard": 4, "dp_replicate": FREE}, "start 4 or 8 ranks"),
        (8, {"dp_shard": 4}, "needs 4 ranks; start 4 ranks, or leave one axis free"),
        (8, {"dp_shard": FREE, "dp_replicate": FREE}, "only one axis can be free"),
        (8, {"dp_shard": 0, "tp": FREE}, "change the axes"),
    ],
)
def test_what_does_not_fit_is_refused(world_size: int, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout.resolve(world_size, **sizes)


def test_a_negative_axis_is_refused() -> None:
    with pytest.raises(LayoutError, match="an axis needs at least one rank"):
        Layout(tp=-2)


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="outside a world of 4"):
        Layout(tp=4).coordinates(4)


def test_the_mesh_stands_where_the_layout_says() -> None:
    """At 4,096 ranks, over torch's fake process group."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    layout = Layout(pp=2, dp_replicate=4, dp_shard=64, tp=8)
    rank = 2741
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        mesh = layout.build_mesh("cpu")
        assert mesh.mesh_dim_names == ("pp", "dp_replicate", "dp_shard", "tp")
        here = layout.coordinates(rank)
        assert tuple(mesh.get_coordinate() or ()) == (
            here.pp,
            here.dp_replicate,
            here.dp_shard,
            here.tp,
        )
        assert tuple(mesh["tp"].mesh.tolist()) == layout.group(rank, "tp")
        assert tuple(mesh["dp_shard"].mesh.tolist()) == layout.group(rank, "dp_shard")
    finally:
        dist.destroy_process_group()
