"""The certificate's arithmetic: fingerprints, layouts by name, and where two traces part."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from drivetrain.cli.verify import _parity_lines
from drivetrain.core.errors import ConfigError
from drivetrain.verify.parity.certificate import LayoutResult
from drivetrain.verify.parity.compare import (
    TOLERANCES,
    StepNumbers,
    agreed_before,
    first_parting,
    largest_deviations,
    locate,
)
from drivetrain.verify.parity.fingerprint import deviation, fingerprint, of_number
from drivetrain.verify.parity.layouts import AskedLayout, parse_layouts
from drivetrain.verify.parity.micro_batches import differ_under_auto, grows_with_size
from drivetrain.verify.parity.trace import Key, TraceEntry, TraceStage, own_name

FP32 = TOLERANCES["fp32"]


def entry(
    stage: TraceStage, place: str, tensor: torch.Tensor, step: int = 1, micro: int = -1
) -> TraceEntry:
    return TraceEntry(Key(step, stage, place, micro), fingerprint(tensor))


def test_a_swap_or_a_shift_changes_a_fingerprint() -> None:
    values = torch.randn(300, 70, generator=torch.Generator().manual_seed(0))
    reference = fingerprint(values)
    assert deviation(fingerprint(values.clone()), reference) == 0
    assert deviation(fingerprint(values * (1 + 1e-7)), reference) < 1e-6
    for changed in (values.roll(1, 0), values.flip(0), torch.cat([values[150:], values[:150]])):
        assert deviation(fingerprint(changed), reference) > 0.1


def test_one_wrong_element_of_many_is_seen() -> None:
    values = torch.randn(5000)
    wrong = values.clone()
    wrong[4321] += 0.1
    expected = 0.1 / values.norm().item()
    assert deviation(fingerprint(wrong), fingerprint(values)) == pytest.approx(expected, rel=0.01)


def test_what_is_not_a_number_is_not_the_same() -> None:
    nan = fingerprint(torch.tensor([1.0, math.nan]))
    assert deviation(nan, fingerprint(torch.tensor([1.0, 2.0]))) == math.inf
    assert deviation(of_number(1.0), fingerprint(torch.ones(2))) == math.inf


def test_layouts_by_name_and_spelled_out() -> None:
    text = (
        "ddp:2, hsdp:2x3,hsdp:8,parallel.strategy=fsdp,parallel.dp_shard=2@4,fsdp+tp:2x2,seed=1@3"
    )
    hsdp = "parallel.strategy=fsdp"
    assert parse_layouts(text) == [
        AskedLayout("ddp:2", 2, ("parallel.strategy=ddp", "parallel.dp_replicate=2")),
        AskedLayout("hsdp:2x3", 6, (hsdp, "parallel.dp_replicate=2", "parallel.dp_shard=3")),
        AskedLayout("hsdp:8", 8, (hsdp, "parallel.dp_replicate=2", "parallel.dp_shard=4")),
        AskedLayout(
            "parallel.strategy=fsdp,parallel.dp_shard=2@4",
            4,
            ("parallel.strategy=fsdp", "parallel.dp_shard=2"),
        ),
        AskedLayout("fsdp+tp:2x2", 4, (hsdp, "parallel.dp_shard=2", "parallel.tp=2")),
        AskedLayout("seed=1@3", 3, ("seed=1",)),
    ]


def test_everything_wrong_with_layouts_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_layouts("dpp:2,ddp,hsdp:3,seed=1@0,seed=2")
    assert [problem.value for problem in caught.value.problems] == [
        "dpp:2",
        "ddp",
        "hsdp:3",
        "seed=1@0",
        "seed=2",
    ]
    with pytest.raises(ConfigError, match="ddp2: is not a layout; did you mean ddp:2?"):
        parse_layouts("ddp2")
    with pytest.raises(ConfigError, match="did you mean hsdp:2x2?"):
        parse_layouts("hsdp2x2")
    with pytest.raises(ConfigError, match="names no layout"):
        parse_layouts(" ,")


def test_ranks_that_share_a_batch_do_not_make_micro_batches_smaller() -> None:
    layouts = parse_layouts("tp:2,fsdp+tp:2x2,hsdp:2x2,tp+pp:2x2")
    assert [layout.num_shares for layout in layouts] == [1, 2, 4, 1]
    assert differ_under_auto(layouts)
    assert not differ_under_auto([layouts[0], layouts[3]])


def test_a_loss_that_grows_with_its_micro_batch_is_a_sum() -> None:
    small = {1: StepNumbers(10.0, 1.0), 2: StepNumbers(9.0, 1.0)}
    assert grows_with_size(8, small, 32, {1: StepNumbers(40.02, 1.0)})
    assert not grows_with_size(8, small, 32, {1: StepNumbers(20.0, 1.0)})
    assert not grows_with_size(8, small, 32, {1: StepNumbers(10.1, 1.0)})
    assert not grows_with_size(8, small, 32, {1: StepNumbers(math.nan, 1.0)})
    assert not grows_with_size(8, {}, 32, {})


def test_the_first_step_that_parts() -> None:
    reference = {1: StepNumbers(2.0, 1.0), 2: StepNumbers(1.5, 1.0), 3: StepNumbers(1.0, None)}
    assert first_parting(reference, reference, FP32) is None
    norm = {**reference, 2: StepNumbers(1.5, 1.1)}
    parting = first_parting(reference, norm, FP32)
    assert parting is not None
    assert (parting.step, parting.what, parting.here) == (2, "gradient norm", 1.1)
    parting = first_parting(reference, {**norm, 1: StepNumbers(math.nan, 1.0)}, FP32)
    assert parting is not None
    assert (parting.step, parting.what) == (1, "loss")
    shorter = first_parting(reference, {1: reference[1], 2: reference[2]}, FP32)
    assert shorter is not None
    assert shorter.step == 3
    assert largest_deviations(reference, norm) == pytest.approx((0.0, 0.1))


def test_of_a_late_difference_it_is_said_what_it_may_be() -> None:
    reference = {step: StepNumbers(1.0, None) for step in range(1, 7)}
    here = {**reference, 4: StepNumbers(1.0 + 1.5e-7, None), 6: StepNumbers(1.3, None)}
    parting = first_parting(reference, here, FP32)
    assert parting is not None
    agreed = agreed_before(parting, None, reference, here)
    assert agreed == pytest.approx(1.5e-7)
    x = torch.randn(64)
    seen = [entry(TraceStage.UPDATE, "a", x, 6)]
    other = locate(seen, {0: [entry(TraceStage.UPDATE, "a", 2 * x, 6)]}, FP32)
    assert agreed_before(parting, other, reference, here) is None

    ddp, bitwise, fsdp = parse_layouts("ddp:2,bitwise:2,fsdp:2")
    lines = "\n".join(_parity_lines(LayoutResult(ddp, 0.3, 0.0, parting, agreed=agreed), 6))
    assert "no module or parameter was seen to differ" in lines
    assert "agreed to 1.5e-07 for 5 steps, then parted at step 6: a rounding difference" in lines
    assert "run it again with reproducibility=bitwise" in lines
    for layout in (bitwise, fsdp):
        result = LayoutResult(layout, 0.3, 0.0, parting, agreed=agreed)
        assert "again with" not in "\n".join(_parity_lines(result, 6))
    lines = "\n".join(_parity_lines(LayoutResult(ddp, 0.3, 0.0, parting, other), 6))
    assert "rounding" not in lines


def test_the_first_place_in_order_of_execution_is_named() -> None:
    x = torch.randn(64)
    reference = [
        entry(TraceStage.FORWARD, "a", x, micro=0),
        entry(TraceStage.FORWARD, "b", x, micro=0),
        entry(TraceStage.FORWARD, "a", x, micro=1),
        entry(TraceStage.BACKWARD, "b.weight", x),
        entry(TraceStage.BACKWARD, "a.weight", x),
    ]
    first, second = [reference[0], reference[1]], [entry(TraceStage.FORWARD, "a", 2 * x, micro=1)]
    gradients = [entry(TraceStage.BACKWARD, name, 3 * x) for name in ("b.weight", "a.weight")]
    divergence = locate(reference, {0: first + gradients, 1: second + gradients}, FP32)
    assert divergence is not None
    assert (divergence.stage, divergence.place, divergence.micro) == (TraceStage.FORWARD, "a", 1)
    assert divergence.ranks == (1,)
    second = [reference[2]]
    divergence = locate(reference, {0: first + gradients, 1: second + gradients}, FP32)
    assert divergence is not None
    assert divergence.place == "b.weight"
    assert divergence.ratio == pytest.approx(3.0)
    assert "also all 1 others of this stage, by the same factor 3" in str(divergence)


def test_gradients_that_an_engine_takes_are_not_missing() -> None:
    x = torch.randn(64)
    reference = [
        entry(TraceStage.FORWARD, "a", x, micro=0),
        entry(TraceStage.LOSS, "loss", x, micro=0),
        entry(TraceStage.BACKWARD, "a.weight", x),
        entry(TraceStage.UPDATE, "a.weight", x),
    ]
    seen, unseen = reference[:2], entry(TraceStage.UNSEEN, "gradients", x, step=0)
    divergence = locate(reference, {0: seen}, FP32)
    assert divergence is not None
    assert divergence.stage is TraceStage.BACKWARD
    assert locate(reference, {0: [unseen, *seen]}, FP32) is None
    other = [unseen, entry(TraceStage.FORWARD, "a", 2 * x, micro=0), reference[1]]
    divergence = locate(reference, {0: other}, FP32)
    assert divergence is not None
    assert divergence.stage is TraceStage.FORWARD


def test_shards_and_terms_are_put_together() -> None:
    x = torch.randn(10, 8)
    loss = torch.tensor(6.0)
    reference = [
        entry(TraceStage.FORWARD, "a", x, micro=0),
        entry(TraceStage.LOSS, "loss", loss, micro=0),
    ]
    halves = {
        rank: [
            entry(TraceStage.FORWARD, "a", half, micro=0),
            entry(TraceStage.LOSS, "loss", torch.tensor(2.0 + 2.0 * rank), micro=0),
        ]
        for rank, half in enumerate(x.chunk(2, dim=1))
    }
    assert locate(reference, halves, FP32) is None
    halves[1][0] = entry(TraceStage.FORWARD, "a", x[:, 4:] + 1, micro=0)
    assert locate(reference, halves, FP32) is not None


def test_a_gradient_that_is_rounding_alone_raises_no_alarm() -> None:
    usual, nothing = torch.randn(100), torch.randn(10) * 1e-9
    reference = [
        entry(TraceStage.BACKWARD, "weight", usual),
        entry(TraceStage.BACKWARD, "key bias", nothing),
    ]
    here = [reference[0], entry(TraceStage.BACKWARD, "key bias", -nothing)]
    assert locate(reference, {0: here}, FP32) is None
    here = [reference[0], entry(TraceStage.BACKWARD, "key bias", usual[:10] * 1e-4)]
    assert locate(reference, {0: here}, FP32) is not None


def test_names_are_the_users() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(nn.Linear(2, 2), checkpoint_wrapper(nn.Linear(2, 2)))
    names = {own_name(name) for name, _ in model.named_parameters()}
    assert names == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert own_name("") == "model"
