"""The parts of a rehearsal that need no rank."""

from __future__ import annotations

import copyreg
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from drivetrain.cli.planning import memory_size
from drivetrain.config.load import resolve
from drivetrain.core.errors import ConfigError
from drivetrain.data.batches import BatchPlan
from drivetrain.parallel.layout import Layout
from drivetrain.plan.of_config import candidate_of
from drivetrain.rehearse.beside_plan import PEAK, Prediction, compare
from drivetrain.rehearse.calls import Line, RehearsedCall, here, is_users
from drivetrain.rehearse.fake_tensor_dispatch import FakeTensorDispatch, LiveBytes
from drivetrain.rehearse.findings import Failure, RankMemory, RankReport, find
from drivetrain.rehearse.world import axes_of, choose_ranks, speaker_for

LARGE = Layout(pp=4, dp_shard=128, tp=8)


def test_a_sample_has_every_stage_and_the_last_along_each_axis() -> None:
    chosen = choose_ranks(LARGE, "sample")
    assert len(chosen) == 4 * 3
    places = [LARGE.coordinates(each.rank) for each in chosen]
    assert {place.pp for place in places} == {0, 1, 2, 3}
    assert {(place.dp_shard, place.tp) for place in places} == {(0, 0), (127, 0), (0, 7)}
    assert chosen[0].kind == "first stage"
    assert {each.kind for each in chosen} >= {"last stage", "stage 1", "stage 2, last along tp"}


def test_all_kinds_are_all_ranks_of_a_small_world() -> None:
    small = Layout(pp=2, dp_shard=2, tp=2)
    assert [each.rank for each in choose_ranks(small, "all-kinds")] == list(range(8))
    assert [each.rank for each in choose_ranks(Layout(dp_replicate=2), "sample")] == [0, 1]


@pytest.mark.parametrize("number", [1, 4, 7, 100, 5000])
def test_a_number_takes_about_as_many_with_whole_pipelines(number: int) -> None:
    chosen = choose_ranks(LARGE, str(number))
    assert len(chosen) % 4 == 0
    assert min(4096, number) <= len(chosen) < number + 4 or len(chosen) == 4096
    assert chosen[0].rank == 0
    if number >= 8:
        assert chosen[-1].rank == 4095


def test_the_rank_most_like_another_speaks_for_it() -> None:
    rehearsed = [each.rank for each in choose_ranks(LARGE, "sample")]
    at = LARGE.coordinates(0)._replace
    same_samples = LARGE.rank(at(pp=2, dp_shard=127, tp=7))
    assert LARGE.coordinates(speaker_for(same_samples, rehearsed, LARGE)) == at(pp=2, dp_shard=127)
    same_part = LARGE.rank(at(pp=1, dp_shard=5, tp=7))
    assert LARGE.coordinates(speaker_for(same_part, rehearsed, LARGE)) == at(pp=1, tp=7)


def test_what_cannot_be_chosen_is_said() -> None:
    with pytest.raises(ConfigError, match="--ranks = some: neither"):
        choose_ranks(LARGE, "some")


@pytest.mark.parametrize(
    ("text", "size"), [("80G", 80 * 2**30), ("512MiB", 2**29), ("1.5gb", 3 * 2**29), ("9", 9)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert memory_size(text) == size


def test_a_wrong_size_is_said() -> None:
    with pytest.raises(ConfigError, match="--device-memory = lots: not a size; write 80G"):
        memory_size("lots")


def test_axes_of_a_group() -> None:
    assert axes_of(LARGE.group(0, "tp"), LARGE) == "tp"
    assert axes_of(LARGE.group(9, "dp_shard"), LARGE) == "dp_shard"
    assert axes_of(LARGE.group(9, "pp", "tp"), LARGE) == "pp × tp"
    assert axes_of(tuple(range(4096)), LARGE) == "all ranks"


def test_the_users_line_is_found_and_a_librarys_is_not() -> None:
    line = here()
    assert line is not None
    assert "line = here()" in str(line)
    assert not is_users(pytest.__file__)


def test_live_bytes_follow_tensors_and_not_their_views() -> None:
    tensors = FakeTensorDispatch(LiveBytes())
    with tensors, tensors.memory.following_resizes():
        one = torch.empty(500, 500)
        assert isinstance(one, FakeTensor)
        two = one + 1
        assert tensors.memory.live == 2_000_000
        view = two.view(-1)[10:]
        del one, two
        assert (tensors.memory.live, tensors.memory.peak) == (1_000_000, 2_000_000)
        view.untyped_storage().resize_(0)
        assert tensors.memory.live == 0


def test_whole_numbers_and_single_values_stay_real() -> None:
    tensors = FakeTensorDispatch(LiveBytes())
    with tensors:
        assert torch.arange(10).sum().item() == 45
        assert torch.zeros(1).item() == 0.0
        assert (torch.zeros(3) + 2).sum().item() == 1.0  # not known: answered, and noted
    assert len(tensors.values_read) == 1


def test_a_fake_tensor_is_sent_as_its_shape_until_the_rehearsal_is_over() -> None:
    """How a class is pickled is a matter of the whole process: exports write fake tensors, too."""
    with FakeTensorDispatch(LiveBytes()) as tensors:
        with tensors.fake:
            sent = pickle.dumps(torch.empty(3, 5))
        received = pickle.loads(sent)  # noqa: S301
        assert isinstance(received, FakeTensor)
        assert received.shape == (3, 5)
    assert FakeTensor not in copyreg.dispatch_table


def test_a_limit_is_noted_where_it_is_passed() -> None:
    tensors = FakeTensorDispatch(LiveBytes())
    tensors.memory.watch(3_000_000)
    with tensors:
        small = torch.empty(500, 1000)
        assert tensors.memory.over is None
        large = torch.empty(1000, 1000)  # here
    assert tensors.memory.over is not None
    line = tensors.memory.over[1]
    assert line is not None
    assert line.text.endswith("# here")
    del small, large


HERE, THERE = Line(__file__, 1, "f"), Line(__file__, 2, "g")


def call(name: str, num_bytes: int = 8, line: Line | None = None) -> RehearsedCall:
    return RehearsedCall(name, num_bytes, "float32", (0, 1, 2, 3), line=line)


def test_equal_sequences_are_no_finding() -> None:
    calls = (call("all_gather"), call("all_reduce", line=HERE))
    other = (call("all_gather"), call("all_reduce", line=THERE))
    assert find([RankReport(0, "a", calls), RankReport(3, "b", other)], None) == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ((call("all_gather"),), "rank 0 calls all_reduce of 8 B float32 as call 2"),
        ((call("all_gather"), call("all_reduce", 16)), "call 2 of a group of 4 is all_reduce"),
        ((call("all_reduce"), call("all_gather")), "call 1 of a group of 4 is all_gather"),
    ],
)
def test_unequal_sequences_are_found(other: tuple[RehearsedCall, ...], words: str) -> None:
    calls = (call("all_gather"), call("all_reduce", line=HERE))
    found = find([RankReport(0, "a", calls), RankReport(3, "b", other)], None)
    assert [finding.what for finding in found] == ["unequal collectives"]
    assert words in found[0].message


def test_a_rank_that_failed_is_the_cause_and_those_that_waited_are_not() -> None:
    failed = RankReport(2, "b", failure=Failure("ValueError", "bad", HERE))
    waited = RankReport(0, "a", failure=Failure("NotTogether", "alone", THERE, is_together=False))
    found = find([waited, failed], None)
    assert [(finding.what, finding.ranks) for finding in found] == [("error", (2,))]
    assert "bad" in str(found[0])


def test_memory_is_judged_by_the_device() -> None:
    over = RankMemory(peak=2**31, over=("computing the loss", HERE))
    found = find([RankReport(0, "a"), RankReport(7, "last stage", memory=over)], 2**30)
    assert [finding.ranks for finding in found] == [(7,)]
    assert "last stage: 2.0 GiB at the peak, but a device has 1.0 GiB" in found[0].message


def test_ranks_without_work_are_a_warning_with_what_to_change() -> None:
    idle = BatchPlan(16, 4, 256, None)
    (found,) = find([RankReport(0, "a", batches=idle), RankReport(255, "b", batches=idle)], None)
    assert found.is_warning
    assert str(found) == (
        "warning: idle ranks (all): 252 of 256 micro-batch slots per step have no samples: "
        "global_batch_size 16 is 4 micro-batches of 4; use at most 4 data-parallel ranks, a "
        "global_batch_size of 1024 (micro_batch_size 4 × 256 ranks) or a multiple of it; no "
        "micro_batch_size gives each of 256 ranks a sample"
    )
    smaller = BatchPlan(256, 4, 128, None).idle_warning
    assert smaller.endswith("a multiple of it, or micro_batch_size 2")
    few = BatchPlan(50, 10, 2, None).idle_warning  # 2 ranks are fewer than 5 already
    assert "is 5 micro-batches of 10; use a global_batch_size of 60 " in few
    assert "data-parallel ranks" not in few
    three = BatchPlan(4, 1, 3, None).idle_warning
    assert "is 4 micro-batches of 1; use a global_batch_size of 6 " in three
    assert BatchPlan(1024, 4, 256, None).idle_warning == ""
    # one turn in forty is how batches and ranks happen to divide
    assert BatchPlan(39, 1, 40, None).idle_warning == ""
    assert find([RankReport(0, "a", batches=BatchPlan(1024, 4, 256, None))], None) == []


def test_a_prediction_beside_idle_ranks_still_exchanges_gradients() -> None:
    config = resolve({"global_batch_size": 16, "micro_batch_size": 4, "max_steps": 1}).config
    assert candidate_of(config, Layout(dp_shard=256)).accumulation == 1
    assert candidate_of(config, Layout(dp_shard=3)).accumulation == 2


def test_what_is_too_small_to_be_counted_is_not_compared_either() -> None:
    exchanged = {("all_reduce", "dp_replicate"): 232.0}
    prediction = Prediction((1e6,), (exchanged,))
    report = RankReport(0, "first rank", memory=RankMemory(peak=10**6))
    compared = compare(prediction, [report], Layout(dp_replicate=4))
    assert [each.what for each in compared] == [PEAK]
