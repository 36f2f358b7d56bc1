"""The planner's arithmetic, and one trace held against the real allocator."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from benchmarks.plan.models import subject_of
from drivetrain.cli.main import app
from drivetrain.cluster.catalogue import catalogue
from drivetrain.cluster.description import Cluster, Device, Link
from drivetrain.cluster.file import ClusterFile, cluster_from, load_cluster
from drivetrain.core.errors import ConfigError
from drivetrain.parallel.layout import Layout
from drivetrain.plan.candidate import Candidate
from drivetrain.plan.cost.estimate import CONTEXT_BYTES, FRAGMENTED, estimate, worst_memory
from drivetrain.plan.cost.parts import rank_parts, stage_parts
from drivetrain.plan.cost.timing import Ring, ring_along
from drivetrain.plan.for_launch import plan_for_command, settings_of
from drivetrain.plan.plan import MEMORY_ERROR, kind_of, make_plan, why_best
from drivetrain.plan.profile.model import Size, Way, fit, part_numbers
from drivetrain.plan.profile.profiling import Profiler
from drivetrain.plan.profile.sources import find_subject, from_script
from drivetrain.plan.profile.subject import Subject
from drivetrain.plan.search import Question, search
from drivetrain.plan.show import show
from drivetrain.strategies.fsdp import FSDP
from drivetrain.train.watch.plan import compare


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    def __init__(self, width: int = 64, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 100)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def batch(samples: int, length: float) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.zeros(samples, round(32 * length), dtype=torch.int64)
    return ids, ids.clone()


@pytest.fixture(scope="module")
def profiler() -> Profiler:
    return Profiler(Subject("net", Net, loss, batch, tokens_per_sample=32, varies_length=True))


def cluster(memory: float = 80e9, nodes: int = 2, between: float = 50e9) -> Cluster:
    device = Device("toy", int(memory), {"fp32": 1e13, "bf16": 1e14}, 1e12, 1e-6)
    return Cluster(nodes, 8, int(memory), device, Link(3e11, 5e-6), Link(between, 1e-5), name="toy")


def test_growth_is_exact_where_it_was_fitted_and_between() -> None:
    def truth(b: float, s: float, tp: int) -> float:
        return 7 + 3 * s + b * (5 * s + 2 * s * s) + (11 + 4 * b * s) / tp

    samples = {
        Size(b, s, tp): np.array(truth(b, s, tp))
        for b in (2, 4)
        for s in (1.0, 0.5)
        for tp in (2, 4)
    }
    found = fit(samples)
    for b, s, tp in ((1, 1.0, 2), (16, 2.0, 8), (3, 0.25, 16)):
        assert found.one(b, s, tp) == pytest.approx(truth(b, s, tp))


def allocated(subject: Subject, samples: int) -> float:
    """The most that a real step has allocated, every allocation counted."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as seen:
        model, data = subject.model(), subject.batch(samples, 1.0)
        optimizer = subject.optimizer(model)
        for _ in range(2):
            subject.loss(model, data).backward()
            optimizer.step()
            optimizer.zero_grad()
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in seen.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    return float(np.cumsum([change for _, change in changes]).max())


def test_a_trace_agrees_with_the_allocator(profiler: Profiler) -> None:
    """The prediction is within a percent of a real step."""
    predicted = worst_memory(
        profiler.profile(Way()), Candidate(Layout(), micro_batch_size=24)
    ).total
    assert predicted == pytest.approx(allocated(profiler.subject, 24), rel=0.01)


class Convolutions(nn.Module):
    """Few pixels and many channels: what a convolution has in hand for its weights counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 256, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(images).mean((2, 3))
        return out


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_convolutions_and_early_optimizer_state_are_counted(kind: Any) -> None:
    """Adagrad has its state before the first step."""
    subject = Subject(
        "convolutions",
        Convolutions,
        lambda model, images: model(images).square().sum(),
        lambda samples, _: torch.zeros(samples, 3, 8, 8),
        lambda model: kind(model.parameters(), lr=0.1),
    )
    profile = Profiler(subject).profile(Way())
    predicted = worst_memory(profile, Candidate(Layout(), micro_batch_size=4)).total
    assert predicted == pytest.approx(allocated(subject, 4), rel=0.03)


def test_blocks_that_are_alike_are_traced_once(profiler: Profiler) -> None:
    assert profiler.shape.kept == (0, 1, 5)
    assert profiler.shape.stands_for == (0, 1, 1, 1, 1, 2)
    assert profiler.profile(Way()).num_parameters == sum(p.numel() for p in Net().parameters())


def test_recomputing_saves_memory_and_costs_operations(profiler: Profiler) -> None:
    plain, again = profiler.profile(Way()), profiler.profile(Way(recompute="full"))
    assert again.saved_bytes(8) < 0.5 * plain.saved_bytes(8)
    # not a third more: what a block's last product gave is not needed again
    assert 1.1 * plain.flops(8) < again.flops(8) < 4 / 3 * plain.flops(8)


def test_stages_have_every_part_once(profiler: Profiler) -> None:
    profile = profiler.profile(Way())
    stages = stage_parts(profile, 3)
    assert [part for stage in stages for part in stage] == profile.shape.positions()


def test_shards_take_less_and_copies_take_all(profiler: Profiler) -> None:
    profile = profiler.profile(Way())
    copies = worst_memory(profile, Candidate(Layout(dp_replicate=8)))
    shards = worst_memory(profile, Candidate(Layout(dp_shard=8), "fsdp"))
    assert shards.optimizer == pytest.approx(copies.optimizer / 8)
    assert shards.total < copies.total


def test_a_ring_costs_what_rings_cost() -> None:
    ring = Ring(4, Link(1e9))
    assert ring.seconds("all_reduce", 4e9) == pytest.approx(6.0)
    assert ring.seconds("all_gather", 4e9) == pytest.approx(3.0)
    assert Ring(1, Link(1e9)).seconds("all_reduce", 4e9) == 0


def test_tp_stays_inside_a_node_and_copies_cross_it() -> None:
    layout, there = Layout(dp_replicate=2, tp=8), cluster()
    assert ring_along(layout, there, "tp").link == there.inside
    across = ring_along(layout, there, "dp_replicate").link
    assert across.bytes_per_s == there.between.bytes_per_s  # type: ignore[union-attr]
    # eight ranks of one node in the same ring have eight ways out
    wide = ring_along(Layout(dp_replicate=16), there, "dp_replicate").link
    assert wide.bytes_per_s == there.inside.bytes_per_s


def test_tokens_stay_inside_a_node_where_experts_do() -> None:
    layout, there = Layout(dp_shard=16, ep=8), cluster()
    assert ring_along(layout, there, "ep") == Ring(8, there.inside)  # type: ignore[arg-type]
    assert ring_along(layout, there, "expert_shard").num_ranks == 2
    assert ring_along(layout, there, "expert_shard").link == there.between
    assert ring_along(Layout(dp_shard=16, ep=16), there, "ep").num_ranks == 16


def test_a_small_model_is_copied_and_a_large_one_sharded(profiler: Profiler) -> None:
    question = Question(64, precisions=("fp32",), strategies=("ddp", "fsdp"))
    plan = make_plan(profiler, cluster(), question)
    assert plan.best is not None
    assert plan.best.candidate.strategy == "ddp"
    tight = make_plan(profiler, cluster(memory=(CONTEXT_BYTES + 3e6) / (1 - FRAGMENTED)), question)
    assert tight.best is not None
    assert tight.best.candidate.strategy == "fsdp"
    assert "ddp" not in {
        one.candidate.strategy for one in tight.ranked if one.candidate.layout.dp > 1
    }


def test_what_is_said_when_no_other_kind_competes_is_true(profiler: Profiler) -> None:
    only_ddp = Question(64, precisions=("fp32",), strategies=("ddp",), max_pp=1)
    plan = make_plan(profiler, cluster(), only_ddp)
    kind, number = kind_of(plan.ranked[0]), len(plan.ranked)
    assert {kind_of(one) for one in plan.ranked} == {"ddp"}
    assert plan.why == f"all {number} plans that fit are of one kind ({kind}); this is the best"
    assert number > 1
    assert why_best(plan.ranked[:1]) == "no other plan fits"
    assert why_best(()) == "nothing fits"


@pytest.mark.parametrize(
    ("number", "words"),
    [(9_610, "9,610"), (999_999, "999,999"), (1_000_000, "1.0 M"), (70_553_706_496, "70.6 B")],
)
def test_parameters_are_counted_in_a_unit_that_shows_them(
    profiler: Profiler, number: int, words: str
) -> None:
    question = Question(64, precisions=("fp32",), strategies=("ddp",), max_pp=1)
    plan = replace(make_plan(profiler, cluster(), question), num_parameters=number)
    text = io.StringIO()
    show(plan, Console(file=text, width=200))
    assert f": {words} parameters on " in text.getvalue()


@pytest.mark.parametrize(
    ("layer", "size", "note"),
    [
        (nn.Identity(), "auto", ""),
        (nn.Dropout(0.1), "auto", ""),
        (nn.Dropout(0.1), 2, ""),
        (nn.Identity(), 4, "micro_batch_size=2 instead of the config's 4\n"),
        (
            nn.Dropout(0.1),
            4,
            "micro_batch_size=2 instead of the config's 4: dropout masks depend on it, so the "
            "numbers change\n",
        ),
        (
            nn.Sequential(nn.Dropout(0.1), nn.BatchNorm1d(4)),
            4,
            "micro_batch_size=2 instead of the config's 4: dropout masks and batch norm's "
            "statistics depend on it, so the numbers change\n",
        ),
    ],
)
def test_another_micro_batch_than_the_configs_is_said(
    layer: nn.Module, size: Any, note: str, tmp_path: Path
) -> None:
    subject = Subject(
        "net",
        lambda: nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4)),
        lambda model, inputs: model(inputs).square().mean(),
        lambda samples, _: torch.zeros(samples, 4),
    )
    question = Question(8, precisions=("fp32",), strategies=("ddp",), configs_micro_batch_size=size)
    four = replace(cluster(nodes=1), devices_per_node=4)
    plan = make_plan(Profiler(subject), four, question)
    text = io.StringIO()
    show(plan, Console(file=text, width=400))
    assert "".join(re.findall(r"micro_batch_size=\d+ instead.*\n", text.getvalue())) == note
    plan.write(tmp_path / "plan.json")
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["notes"] == note.splitlines()


def test_a_scripts_micro_batch_is_known_to_the_planner(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace('"seed": 7', '"seed": 7, "micro_batch_size": 8'))
    (tmp_path / "cluster.yaml").write_text("device: a10\nnodes: 1\ndevices_per_node: 2\n")
    typed = ["plan", str(script), "--cluster", str(tmp_path / "cluster.yaml")]
    said = CliRunner().invoke(app, typed)
    assert (
        "micro_batch_size=4 instead of the config's 8\nto run it: micro_batch_size=4" in said.output
    )


def test_nothing_fits_is_an_answer(profiler: Profiler) -> None:
    question = Question(64, precisions=("fp32",), strategies=("ddp",))
    tiny = cluster(memory=(CONTEXT_BYTES + 1e5) / (1 - FRAGMENTED), nodes=1)
    plan = make_plan(profiler, tiny, question)
    assert plan.best is None
    assert plan.nearest_misses
    assert "needs" in plan.why_not["ddp"]


def test_a_batch_that_no_layout_divides_is_refused(profiler: Profiler) -> None:
    with pytest.raises(ConfigError, match="global_batch_size = 3: no layout of 16 devices"):
        make_plan(profiler, cluster(), Question(3, strategies=("fsdp",), max_pp=1))


def test_every_figure_of_the_catalogue_has_a_source() -> None:
    known = catalogue()
    for entries in (known.devices, known.links, known.instances):
        assert all(len(entry.source) > 10 for entry in entries.values())
    for name in ("v100", "t4", "a10", "l4", "a100-40", "a100-80", "h100", "h200", "b200", "mi300x"):
        assert name in known.devices
    assert all(cluster_from(ClusterFile(instance=name)).device for name in known.instances)


def test_clusters_by_name() -> None:
    found = load_cluster("p5.48xlarge:8")
    assert (found.num_devices, found.price_per_node_hour) == (64, 55.04)
    assert load_cluster("h100:16").num_nodes == 2
    assert load_cluster("H100:8").device == load_cluster("h100:8").device


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("h10:8", "did you mean h100?"),
        ("H10:8", "did you mean h100?"),
        ("h100x8", "did you mean h100:8?"),
        ("P5.48XLARGEx2", "did you mean p5.48xlarge:2?"),
        ("h100:x", "the count is not a whole number"),
        ("h100:12", "devices come in nodes of 8"),
        ("cluster.yaml", "--cluster: no cluster was given, and there is no cluster.yaml in this"),
        ("nowhere.yaml", "no such file; name the hardware, as in --cluster h100:8, or measure"),
    ],
)
def test_a_mistyped_cluster_is_explained(said: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        load_cluster(said)


def test_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("device: h100\nnode: 4\n")
    with pytest.raises(ConfigError, match="did you mean nodes"):
        load_cluster(str(path))


def test_a_key_of_cluster_yaml_that_is_set_twice_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("device: h100\nnodes: 4\nnodes: 8\n")
    with pytest.raises(ConfigError, match="nodes is set on line 2 and on line 3; remove one"):
        load_cluster(str(path))


def test_a_run_that_strays_says_so() -> None:
    plan = {"plans": [{"step_s": {"total": 0.1}, "memory_bytes": {"total": 1e9}}]}
    assert not compare(plan, 0.11, None)["strays"]
    assert compare(plan, 0.2, None)["strays"]
    assert compare(plan, 0.1, 1.1e9)["strays"]
    assert "+100%" in compare(plan, 0.2, None)["says"]


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from drivetrain import Task, Trainer, load_config

def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])

config = load_config(defaults={"global_batch_size": 8, "max_steps": 3, "seed": 7})
data = TensorDataset(torch.zeros(32, 4), torch.zeros(32, 2))
try:
    Trainer(Task(lambda: nn.Linear(4, 2), loss), config).fit(data)
except Exception:
    raise SystemExit("a script's own except must not see it")
"""


def test_a_script_is_stopped_where_it_would_train(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    found = from_script(str(path), ["global_batch_size=16"])
    assert found.resolved is not None
    assert found.resolved.config.global_batch_size == 16
    inputs, targets = found.subject.batch(5, 1.0)
    assert (inputs.shape, targets.shape) == ((5, 4), (5, 2))
    assert not (tmp_path / "runs").exists()
    assert Profiler(found.subject).profile(Way()).num_parameters == 10


def test_a_script_that_never_trains_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "idle.py"
    path.write_text("print('nothing')\n")
    with pytest.raises(ConfigError, match="ended without calling Trainer.fit"):
        from_script(str(path))


OWN_LOOP = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from drivetrain import load_config, prepare

config = load_config(defaults={"global_batch_size": 8, "max_steps": 1, "output_dir": "runs"})
try:
    loop = prepare(nn.Linear(4, 2), None, TensorDataset(torch.zeros(32, 4)), config)
except Exception:
    raise SystemExit("a script's own except must not see it")
for step in loop.steps():
    for (x,) in step:
        loop.backward(loop.model(x).square().mean())
    loop.step()
"""


def test_a_loop_of_ones_own_is_refused_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(OWN_LOOP)
    refusal = (
        r"SCRIPT = train.py: trains in its own loop \(prepare\), which cannot be planned; use "
        r"Trainer.fit, or describe one step .* as docs/planning.md shows under \"A script with"
    )
    planned = CliRunner().invoke(app, ["plan", "train.py", "--cluster", "h100:8"])
    assert isinstance(planned.exception, ConfigError)
    assert planned.exception.exit_code == 2
    assert re.match(refusal, str(planned.exception))
    with pytest.raises(ConfigError, match=refusal):
        plan_for_command(["--nproc-per-node", "2", "train.py"], "h100:8")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"], "no run was begun"


@pytest.mark.parametrize(
    ("said", "words"),
    [("lama-3-70b", "did you mean llama-3-70b"), ("nowhere.py", "no such file")],
)
def test_a_mistyped_model_is_explained(said: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_subject(said)


def test_the_plan_of_a_command_line_becomes_its_words(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"plans": [{"settings": {"parallel.strategy": "fsdp", "parallel.tp": 2}}]}')
    assert settings_of(path) == ["parallel.strategy=fsdp", "parallel.tp=2"]
    path.write_text("{}")
    with pytest.raises(ConfigError, match="contains no plan"):
        settings_of(path)


def test_gradients_are_reduced_in_every_micro_batch_only_where_memory_asks_for_it(
    profiler: Profiler,
) -> None:
    question = Question(64, strategies=("fsdp",), micro_batch_size=1, recomputes=("none",))
    roomy = search(profiler, cluster(nodes=1), question).fitting
    assert all(one.candidate.options == FSDP() for one in roomy)
    plain = next(one for one in roomy if one.candidate.num_shards == 8)
    each = replace(plain.candidate, options=FSDP(reduce_every_micro_batch=True))
    leaner = estimate(profiler, each, cluster(nodes=1))
    assert leaner.memory.total < plain.memory.total
    assert leaner.time.total > plain.time.total
    between = (plain.memory.total + leaner.memory.total) / 2
    tight = cluster(memory=(CONTEXT_BYTES + between) / (1 - FRAGMENTED), nodes=1)
    chosen = search(profiler, tight, question).fitting
    assert each in [one.candidate for one in chosen]
    assert each.settings()["parallel.fsdp.reduce_every_micro_batch"] == "true"


def test_context_parallel_ranks_hold_keys_of_the_whole_and_no_square_of_it() -> None:
    profile = Profiler(subject_of("gpt", "adamw")).profile(Way())
    alone = rank_parts(profile, Candidate(Layout(cp=1), "fsdp", 8))
    shared = rank_parts(profile, Candidate(Layout(cp=2), "fsdp", 8))
    hidden = profile.hand_over_bytes.one(8, 1.0)
    half = part_numbers(profile, 8, 0.5)
    assert shared[1].forward.peak == half[1].forward.peak + 2 * hidden
    assert shared[1].backward.peak == half[1].backward.peak + 4 * hidden
    assert shared[1].saved == half[1].saved
    # half of the queries, all of the keys
    assert alone[1].forward.attention_flops > 0
    assert shared[1].forward.attention_flops == pytest.approx(alone[1].forward.attention_flops / 2)
    # every rank has the loss of the whole
    assert shared[-1].saved == alone[-1].saved


def test_the_error_that_plans_state_is_the_measured_one() -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    measured = json.loads((results / "plan-memory" / "summary.json").read_text())
    assert MEMORY_ERROR.startswith(
        f"{measured['cases']} configurations on a CPU: median {measured['median']:.1%}, "
        f"95th percentile {measured['p95']:.1%}"
    )
