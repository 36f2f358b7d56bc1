"""The widgets: their arithmetic, run by node as it stands on the page, is Drivetrain's own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from drivetrain.cluster.exchange import passes
from drivetrain.config.schema import Pipeline
from drivetrain.learn.attempt import load
from drivetrain.learn.checks import pipeline as pipeline_check
from drivetrain.learn.exercises import exercise_named
from drivetrain.parallel.layout import Layout
from drivetrain.parallel.pipeline.schedules import bubble
from drivetrain.plan.candidate import Candidate
from drivetrain.plan.cost.estimate import _in_flight
from drivetrain.strategies.cost import PartNumbers, Use, cost_model
from drivetrain.strategies.ddp import DDP
from drivetrain.strategies.deepspeed import DeepSpeed
from drivetrain.strategies.fsdp import FSDP
from tests.pages.widgets import TITLES, model_of

DOCS = Path(__file__).parents[2] / "docs"
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="the pages' scripts are run by node")


def evaluated(widget: str, expression: str) -> Any:
    """What the page's own script says."""
    script = f"{model_of((DOCS / 'widgets' / f'{widget}.html').read_text())}\n"
    script += f"console.log(JSON.stringify({expression}))"
    return json.loads(subprocess.check_output([str(NODE), "-e", script], text=True))


@pytest.mark.parametrize("name", TITLES)
def test_a_page_asks_nobody_for_anything(name: str) -> None:
    html = (DOCS / "widgets" / f"{name}.html").read_text()
    without_names = html.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"https?:|//[\w.-]+/|\bsrc=|\bimport\b|fetch\(|url\((?!#)", without_names)
    assert "light-dark(" in html
    assert "data-md-color-scheme" in html


@needs_node
def test_every_rank_of_the_ring_ends_with_everything_and_sends_the_least() -> None:
    sizes = range(2, 9)
    found = evaluated(
        "ring",
        f"{list(sizes)}.map(n => [ringSteps(n), holdings(n, 2 * (n - 1)), holdings(n, n - 1),"
        " sentBytes(n, 2 * (n - 1), 1e6), leastBytes(n, 1e6)])",
    )
    for n, (steps, at_end, half_way, sent, least) in zip(sizes, found, strict=True):
        everyone = list(range(n))
        assert at_end == [[everyone] * n] * n
        assert [sum(chunk == everyone for chunk in rank) for rank in half_way] == [1] * n
        for step in steps:
            assert [(move["from"], move["to"]) for move in step["moves"]] == [
                (rank, (rank + 1) % n) for rank in range(n)
            ]
        assert sent == pytest.approx(least) == pytest.approx(passes("all_reduce", n) * 1e6)


@needs_node
def test_the_pipeline_is_the_solutions_and_its_bubble_the_planners() -> None:
    solution = load(exercise_named("pipeline").solution)
    sizes = [(1, 3), (2, 1), (2, 4), (3, 6), (4, 2), (4, 8), (8, 16)]
    found = evaluated(
        "pipeline",
        f"{[list(each) for each in sizes]}.map(([p, m]) => ['gpipe', '1f1b'].map(kind =>"
        " [[...Array(p).keys()].map(s => [schedule(kind, s, p, m), peakKept(kind, s, p, m)]),"
        " timeline(kind, p, m, 1, 2).total, idleShare(timeline(kind, p, m, 1, 2), p, m, 1, 2),"
        " bubbleFormula(p, m)]))",
    )
    for (p, m), by_kind in zip(sizes, found, strict=True):
        for name, make, (stages, total, idle, formula) in zip(
            ("gpipe", "1f1b"), (solution.gpipe, solution.one_f_one_b), by_kind, strict=True
        ):
            orders = [make(stage, p, m) for stage in range(p)]
            assert [[tuple(each) for each in order] for order, _ in stages] == orders
            assert total == pipeline_check._simulated(orders)[0]
            planned = Candidate(Layout(pp=p), accumulation=m, schedule=name)  # type: ignore[arg-type]
            kept = [_in_flight(planned, stage) for stage in range(p)]
            assert [peak for _, peak in stages] == (
                kept if p > 1 else [m if name == "gpipe" else 1]
            )
            assert idle == pytest.approx(formula)
            assert formula == pytest.approx(bubble(Pipeline(schedule=name), p, m))  # type: ignore[arg-type]


def _planned(stage: int, ranks: int, weights: float, gradients: float, state: float) -> float:
    """The least that a rank holds, as the planner has it."""
    if stage == 0:
        use = Use(Layout(dp_replicate=ranks), DDP())
        return cost_model("ddp").least_state(weights, gradients, state, use)
    options = DeepSpeed(zero_stage=stage)  # type: ignore[arg-type]
    use = Use(Layout(dp_shard=ranks), options)
    return cost_model("deepspeed").least_state(weights, gradients, state, use)


@needs_node
@pytest.mark.parametrize("ranks", [1, 2, 64])
def test_memory_by_stage_is_the_planners(ranks: int) -> None:
    parameters = 7.5e9
    found = evaluated(
        "zero-memory",
        "Object.keys(FORMATS).flatMap(f => Object.keys(OPTIMIZERS).map(o =>"
        " [bytesPerParameter(f, o),"
        f" [0, 1, 2, 3].map(s => perRank({parameters}, {ranks}, s, f, o))]))",
    )
    assert len(found) == 12
    for each, stages in found:
        weights, gradients, state = (
            parameters * each[name] for name in ("weights", "gradients", "optimizer")
        )
        for stage, rank in enumerate(stages):
            planned = _planned(stage, ranks, weights, gradients, state)
            assert rank["total"] == pytest.approx(planned)
        sharded = Use(Layout(dp_shard=ranks), FSDP())
        least = cost_model("fsdp").least_state(weights, gradients, state, sharded)
        assert stages[3]["total"] == pytest.approx(least)


@needs_node
def test_what_a_rank_holds_all_the_time_is_what_the_planner_walks_with() -> None:
    """AdamW in fp32: weights and optimizer of ddp's and fsdp's walks through a step."""
    parameters, ranks = 1e6, 8
    part = PartNumbers(parameters=4 * parameters, trained=4 * parameters, optimizer=8 * parameters)
    stages = evaluated(
        "zero-memory", f"[0, 3].map(s => perRank({parameters}, {ranks}, s, 'fp32', 'adam'))"
    )
    layouts = (("ddp", Layout(dp_replicate=ranks), DDP()), ("fsdp", Layout(dp_shard=ranks), FSDP()))
    for (name, layout, options), found in zip(layouts, stages, strict=True):
        held = cost_model(name).walk([part], [False], 0.0, Use(layout, options)).held()
        assert (found["weights"], found["optimizer"]) == (held.parameters, held.optimizer)


@needs_node
def test_the_lecture_and_the_widget_agree() -> None:
    """Chapter 1 prints 120.0, 31.4, 16.6 and 1.9 GB."""
    totals = evaluated(
        "zero-memory", "[0, 1, 2, 3].map(s => perRank(7.5e9, 64, s, 'master', 'adam').total)"
    )
    page = (DOCS / "lectures" / "1-fundamentals.md").read_text()
    for stage, total in enumerate(totals):
        assert f"stage {stage}: {total / 1e9:6.1f} GB per device" in page


@pytest.mark.parametrize("name", TITLES)
def test_a_lecture_and_the_course_page_show_it(name: str) -> None:
    lectures = [path.read_text() for path in (DOCS / "lectures").glob("*.md")]
    assert any(f"](../widgets/{name}.html)" in page for page in lectures)
    assert any(f'src="../../widgets/{name}.html' in page for page in lectures)
    assert f"](widgets/{name}.html)" in (DOCS / "learn.md").read_text()
