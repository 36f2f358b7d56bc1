"""Experts: how they are found and refused, how their load is counted, shown and judged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.cluster.description import Cluster, Device, Link
from drivetrain.config.load import resolve
from drivetrain.core.errors import ConfigError
from drivetrain.diagnose.experts import RECORDS, hot_expert
from drivetrain.diagnose.finding import Kind
from drivetrain.diagnose.run import diagnose
from drivetrain.parallel.expert.finding import find_experts, spread_problems
from drivetrain.parallel.layout import Layout
from drivetrain.parallel.tensor import plan_for
from drivetrain.plan.candidate import Candidate
from drivetrain.plan.cost.estimate import worst_memory
from drivetrain.plan.cost.parts import exchanged_bytes
from drivetrain.plan.profile.model import Way
from drivetrain.plan.profile.profiling import Profiler
from drivetrain.plan.profile.sources import from_script
from drivetrain.plan.search import Question, search
from drivetrain.record.expert_load import (
    MOST_RECORDED,
    LoadRecord,
    load_records,
    recorded,
    shape_of,
)
from drivetrain.record.reading import open_run
from drivetrain.strategies.fsdp import FSDP
from drivetrain.strategies.fsdp.strategy import FSDPStrategy
from drivetrain.strategies.strategy import Profile
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer
from drivetrain.view.describe import view_whole
from drivetrain.view.page import report_page
from drivetrain.view.terminal.panels import expert_lines
from tests.ranks import models
from tests.ranks.matrix import config


class Own(nn.Module):
    """The smallest thing that is a layer's experts."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.ones(num_experts, 8, 8))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = torch.einsum("tkij,tj->tki", self.weight[chosen], x)
        return (rows * weights[..., None]).sum(1)


class Holder(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts


def test_experts_are_found_by_their_form() -> None:
    found = find_experts(models.moe())
    assert [each.name for each in found] == [f"blocks.{i}.moe.experts" for i in range(4)]
    assert {each.count for each in found} == {8}
    assert find_experts(nn.TransformerEncoderLayer(8, 2)) == []


def test_hugging_faces_experts_are_found_and_its_routers_are_not() -> None:
    pytest.importorskip("transformers")
    for make in (models.mixtral, models.qwen_moe):
        names = [each.name for each in find_experts(make())]
        assert names == [f"model.layers.{i}.mlp.experts" for i in range(4)]


def test_tp_leaves_experts_whole_whatever_the_models_plan_says() -> None:
    pytest.importorskip("transformers")
    cuts = plan_for(models.mixtral(), "model", 2)
    assert cuts
    assert not any("experts" in cut.name for cut in cuts)


def test_names_must_be_those_of_experts() -> None:
    model = models.moe()
    assert len(find_experts(model, ["blocks.*.moe.experts"])) == 4
    with pytest.raises(ConfigError, match=r"no module has this name; use blocks\.\*\.moe\.experts"):
        find_experts(model, ["blocks.*.mlp"])
    with pytest.raises(ConfigError, match="has no positive num_experts"):
        find_experts(model, ["blocks.*.qkv"])


def _tied() -> nn.Module:
    first, second = Own(), Own()
    second.weight = first.weight
    return nn.ModuleDict({"a": Holder(first), "b": Holder(second)})


def _with(change: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        experts = Own()
        change(experts)
        return Holder(experts)

    return made


REFUSED: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "does not divide the 4 experts of experts; use one of 1, 2, 4": (lambda: Holder(Own()), 3),
    "is the same weight as b.experts.weight": (_tied, 2),
    "experts.scale does not have one row per expert": (
        _with(lambda e: e.register_parameter("scale", nn.Parameter(torch.ones(8, 8)))),
        2,
    ),
    "experts.seen is a buffer": (_with(lambda e: e.register_buffer("seen", torch.zeros(4))), 2),
    "would drop different features": (_with(lambda e: e.add_module("drop", nn.Dropout(0.1))), 2),
    "are separate modules, in a list": (
        lambda: Holder(nn.ModuleList(nn.Linear(8, 8) for _ in range(4))),
        2,
    ),
    "no experts were found in Linear": (lambda: nn.Linear(8, 8), 2),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_what_cannot_be_spread_is_refused_in_a_sentence(rule: str) -> None:
    make, num_ranks = REFUSED[rule]
    model = make()
    problems = spread_problems(model, find_experts(model), num_ranks)
    assert any(rule in str(problem) for problem in problems), problems


def test_ep_lies_inside_dp_shard() -> None:
    layout = Layout.resolve(16, dp_shard=4, dp_replicate=2, tp=2, ep=2)
    assert str(layout).endswith("dp_shard=4 × tp=2 (ep=2)")
    assert layout.world_size == 16
    # neighbours along dp_shard, at the same place along every other axis
    assert layout.expert_group(0) == (0, 2)
    assert layout.expert_group(7) == (5, 7)
    groups = {layout.expert_group(rank) for rank in range(16)}
    assert sorted(rank for group in groups for rank in group) == list(range(16))
    with pytest.raises(ConfigError, match="does not divide the 4 ranks along dp_shard"):
        Layout(dp_shard=4, ep=3)


def test_what_a_rank_holds_and_sends_goes_by_its_own_experts() -> None:
    model = nn.ModuleList([nn.Linear(16, 16, bias=False), Holder(Own(8))])
    profile = Profile.of(model, micro_batches_per_step=2)
    dense, experts = 16 * 16 * 4, 8 * 8 * 8 * 4
    assert (profile.parameter_bytes, profile.expert_bytes) == (dense + experts, experts)
    strategy, cluster = FSDPStrategy(FSDP()), Cluster(1, 8)
    apart = strategy.cost(profile, Layout(dp_shard=8, ep=4), cluster)
    plain = strategy.cost(profile, Layout(dp_shard=8), cluster)
    assert apart.parameter_bytes == plain.parameter_bytes == (dense + experts) // 8
    # whole between two micro-batches: of the experts a quarter
    assert plain.gradient_bytes - apart.gradient_bytes == experts * 3 // 4
    # gathered twice in each of two micro-batches, reduced once: between 8 ranks, or 2
    assert plain.sent_bytes_per_step == 5 * (dense + experts) * 7 // 8
    assert apart.sent_bytes_per_step == 5 * dense * 7 // 8 + 5 * (experts // 4) // 2


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({}, "cannot be combined with ddp; use parallel.strategy=fsdp"),
        ({"parallel.strategy": "fsdp", "parallel.dp_shard": 3}, "does not divide dp_shard = 3"),
        ({"parallel.strategy": "fsdp", "parallel.cp": 2}, "cannot be combined with ep yet"),
        ({"parallel.strategy": "fsdp", "compile.enabled": True}, "cannot be combined with ep yet"),
        ({"parallel.strategy": "fsdp", "memory.offload": "cpu"}, "cannot be combined with ep yet"),
        ({"parallel.strategy": "fsdp", "precision.dtype": "fp16"}, "overflows on other ep ranks"),
    ],
)
def test_what_ep_does_not_go_with_is_refused(changes: dict[str, Any], rule: str) -> None:
    said: dict[str, Any] = {"max_steps": 1, "global_batch_size": 8, "parallel": {"ep": 2}}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        said.setdefault(section, {})[name] = value
    with pytest.raises(ConfigError, match=rule):
        resolve(said)


def test_the_load_of_one_process_is_counted_balanced_and_shown(tmp_path: Path) -> None:
    task, data = models.task_of("moe")
    told: list[list[int]] = []

    def make() -> nn.Module:
        model = models.moe(layers=2)
        layer: Any = model.get_submodule("blocks.0.moe")
        balance = layer.balance

        def listen(load: torch.Tensor) -> None:
            told.append(load.tolist())
            balance(load)

        layer.balance = listen
        return model

    memory = {"activation_checkpointing": "full"}  # recomputed, and not counted twice
    twice = {"replay_every_steps": 2}  # nor what is computed once more to be compared
    settings = config(str(tmp_path), 2, {}, memory=memory, sentinel=twice)
    settings["record"]["logging_steps"] = 1
    trainer = Trainer(Task(make, task.loss), settings)
    history = trainer.fit(data)
    assert history.run_dir is not None
    run = open_run(history.run_dir)
    records = load_records(run.events(0))
    tokens = 16 * models.LENGTH * 2  # of a batch, each to two experts
    assert [record.step for record in records] == [1, 2]
    assert [record.num_chosen for record in records] == [2, 2]
    assert all(sum(load) == tokens for record in records for load in record.layers.values())
    assert told == [list(record.layers["blocks.0.moe.experts"]) for record in records]
    assert trainer.model.get_buffer("blocks.0.moe.bias").abs().max() > 0
    view = view_whole(run, 0.0)
    assert view.scalar("experts/busiest").last >= 1.0
    assert "blocks.0.moe.experts" in report_page(view, 0.0)
    assert view.expert_load is not None
    assert any("moe.experts" in line.plain for line in expert_lines(view.expert_load, 60, 5))
    assert diagnose(history.run_dir) is not None


SCRIPT = str(Path(__file__).parents[1] / "scripts" / "even_moe.py")
UNEVEN, CHOSEN, EXPERTS = 2, 2, 8


@pytest.fixture(scope="module")
def profiler() -> Profiler:
    return Profiler(from_script(SCRIPT, [f"parallel.expert.imbalance={UNEVEN}"]).subject)


def test_a_plan_counts_weights_once_however_they_are_spread(profiler: Profiler) -> None:
    weights = sum(p.nbytes for p in models.moe().parameters())
    assert profiler.ep_sizes == (1, 2, 4, EXPERTS)
    for way in (Way(), Way(spreads_experts=True)):
        assert profiler.profile(way).total("parameters", 1) == pytest.approx(weights)


@pytest.mark.parametrize("is_spread", [False, True])
def test_a_plan_counts_the_products_of_experts(profiler: Profiler, is_spread: bool) -> None:
    """A token is multiplied with two experts of a layer, however many there are."""
    model = models.moe()
    experts = sum(p.numel() for e in find_experts(model) for p in e.module.parameters())
    used = experts * CHOSEN / EXPERTS * (UNEVEN if is_spread else 1)
    dense = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    tokens = profiler.subject.batch(1, 1.0)[0].numel()
    attention = (4 + 10) * tokens**2 * models.WIDTH * models.LAYERS  # as torch counts it
    counted = profiler.profile(Way(spreads_experts=is_spread)).flops(1)
    assert counted == pytest.approx(6 * tokens * (dense + used) + attention)


def test_a_plan_counts_what_tokens_send(profiler: Profiler) -> None:
    """Rows and their weights go there, results come back; gradients the other way."""
    candidate = Candidate(Layout(dp_shard=8, ep=4), "fsdp", micro_batch_size=4)
    copies = CHOSEN * UNEVEN * profiler.subject.batch(4, 1.0)[0].numel()
    rows, scales, counts = 4 * models.WIDTH * copies, 4 * copies, 8 * EXPERTS
    sent = exchanged_bytes(profiler.profile(candidate.way), candidate, 0)["all_to_all", "ep"]
    assert sent == pytest.approx(models.LAYERS * (2 * (2 * rows + scales) + counts))


def test_experts_on_more_ranks_take_less_memory(profiler: Profiler) -> None:
    def peak(ep: int) -> float:
        candidate = Candidate(Layout(dp_shard=8, ep=ep), "fsdp", micro_batch_size=1)
        return worst_memory(profiler.profile(candidate.way), candidate).total

    assert peak(8) < peak(4) < peak(2)


def test_a_plan_proposes_to_spread_experts_where_weights_take_long(profiler: Profiler) -> None:
    """Gathering all experts over a slow link takes longer than to send them their tokens."""
    device = Device("fast", 10**11, {"fp32": 1e15}, 1e13)
    slow = Cluster(8, 1, 10**11, device, between=Link(1e6))
    question = Question(
        8, strategies=("fsdp",), max_pp=1, recomputes=("none",), precisions=("fp32",)
    )
    best = search(profiler, slow, question).fitting[0]
    assert best.candidate.layout.ep > 1
    assert best.candidate.settings()["parallel.ep"] == best.candidate.layout.ep
    assert best.time.exchange["ep"] > 0


def _records(*loads: list[int], num_chosen: int = 2) -> list[LoadRecord]:
    return [
        LoadRecord(10 * (at + 1), {"mlp.experts": load}, num_chosen)
        for at, load in enumerate(loads)
    ]


def test_a_hot_expert_is_a_finding() -> None:
    hot = [100, 700, 100, 100, 100, 100, 100, 100]  # 4 times its share
    finding = hot_expert(_records(*[hot] * RECORDS))
    assert finding is not None
    assert "expert 1 of mlp.experts has received at least 4.0 times its share" in finding.what
    assert "100, 700, 100" in finding.evidence[0]


def test_a_run_whose_router_has_collapsed_is_diagnosed(tmp_path: Path) -> None:
    def collapsed() -> nn.Module:
        model = models.moe(layers=1)
        bias = model.get_buffer("blocks.0.moe.bias")
        bias[3] = 10.0  # every token goes there, and to another one
        return model

    task, data = models.task_of("moe")
    settings = config(str(tmp_path), RECORDS, {})
    settings["record"]["logging_steps"] = 1
    history = Trainer(Task(collapsed, task.loss), settings).fit(data)
    assert history.run_dir is not None
    found = [each for each in diagnose(history.run_dir) if each.kind is Kind.HOT_EXPERT]
    assert len(found) == 1
    expected = "expert 3 of blocks.0.moe.experts has received at least 4.0 times its share"
    assert expected in found[0].what


def test_an_expert_that_is_hot_for_a_moment_or_a_little_is_none() -> None:
    hot, even = [100, 700, 100, 100, 100, 100, 100, 100], [100] * 8
    other = [700, *hot[2:], 100]
    assert hot_expert(_records(*[hot] * (RECORDS - 1))) is None
    assert hot_expert(_records(*[hot] * (RECORDS - 1), even)) is None
    assert hot_expert(_records(*[hot] * (RECORDS - 1), other)) is None
    assert hot_expert(_records(*[even] * RECORDS)) is None
    # of 4 experts, 2 of which are chosen, none can get more than twice its share
    assert hot_expert(_records(*[[200, 100, 60, 40]] * RECORDS)) is not None


def test_a_record_is_bounded_and_keeps_the_most_uneven_layers() -> None:
    even, uneven = [2] * 3000, [1] * 2999 + [3001]
    kept = recorded({"even": even, "uneven": uneven, "empty": [0] * 10})
    assert list(kept) == ["uneven"]
    assert sum(map(len, kept.values())) <= MOST_RECORDED


def test_bars_are_as_many_as_there_is_room_for() -> None:
    shape = shape_of("layer", [0, 8, 1, 1], 4)
    assert (shape.bars, shape.expert, shape.num_idle) == ("▁█▂▂", 1, 1)
    assert shape.busiest == pytest.approx(3.2)
    assert len(shape_of("layer", list(range(256)), 32).bars) == 32
