"""The exercises in order, and where their material is."""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.learn.verdict import Passed

COURSE = Path(__file__).parent / "course"

_COMMON_HINTS = COURSE / "hints.yaml"


@dataclass(frozen=True)
class Phase:
    """A folder of exercises."""

    number: int
    folder: str
    title: str

    @property
    def heading(self) -> str:
        return f"phase {self.number}" if self in PHASES else self.folder

    @property
    def argument(self) -> str:
        """The name in `drivetrain learn start`."""
        return str(self.number) if self in PHASES else self.folder


@dataclass(frozen=True)
class Exercise:
    """One file that a learner writes."""

    name: str
    phase: Phase
    title: str
    check_name: str
    """module:function in `checks/`."""

    @property
    def file(self) -> str:
        """Path of the template, relative to the learner's folder."""
        return f"{self.phase.folder}/template_{self.name}.py"

    @property
    def template(self) -> Path:
        return COURSE / self.file

    @property
    def solution(self) -> Path:
        return COURSE / "solutions" / self.phase.folder / f"{self.name}.py"

    @cached_property
    def hints(self) -> dict[str, str]:
        """Hints by what a check found; those named "step…" are given one after another."""
        own: dict[str, Any] = _read(COURSE / self.phase.folder / "hints.yaml")
        return {**_read(_COMMON_HINTS), **own[self.name]}

    def check(self, file: Path) -> Passed:
        """Run the check: raise Shortcoming, or return what was shown."""
        module, function = self.check_name.split(":")
        checks = importlib.import_module(f"drivetrain.learn.checks.{module}")
        passed: Passed = getattr(checks, function)(file)
        return passed


def _read(file: Path) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(file.read_text())
    return values


_ONE = Phase(1, "phase1_data_parallel", "One node: data parallel training")
_PHASE_ONE = (
    Exercise("data_loader", _ONE, "Every sample once, on any number of ranks", "data_loader:check"),
    Exercise("trainer", _ONE, "Average gradients, weighted by tokens", "trainer:check"),
    Exercise("naive_allreduce", _ONE, "All-reduce through rank 0", "all_reduce:check_naive"),
    Exercise("tree_allreduce", _ONE, "All-reduce along a tree", "all_reduce:check_tree"),
    Exercise(
        "halving_allreduce", _ONE, "All-reduce by recursive halving", "all_reduce:check_halving"
    ),
    Exercise("ring_allreduce", _ONE, "All-reduce around a ring", "all_reduce:check_ring"),
    Exercise("measure", _ONE, "Measure latency and bandwidth", "measure:check"),
)

_TWO = Phase(2, "phase2_memory_and_models", "Memory and models")
_PHASE_TWO = (
    Exercise("accumulation", _TWO, "Many micro-batches, one reduction", "accumulation:check"),
    Exercise("loss_scaling", _TWO, "fp16 with loss scaling, and bf16", "loss_scaling:check"),
    Exercise("recomputation", _TWO, "Recompute activations", "recomputation:check"),
    Exercise("split_layer", _TWO, "Two layers split by column and row", "split_layer:check"),
    Exercise("pipeline", _TWO, "A pipeline: GPipe and 1F1B", "pipeline:check"),
)

_THREE = Phase(3, "phase3_many_nodes", "Many nodes")
_PHASE_THREE = (
    Exercise("buckets", _THREE, "DDP: buckets, reduced while backward runs", "buckets:check"),
    Exercise("zero1", _THREE, "ZeRO: shard the optimizer's state", "zero1:check"),
    Exercise("zero3", _THREE, "ZeRO: shard the parameters too", "zero3:check"),
    Exercise(
        "hierarchical_allreduce",
        _THREE,
        "All-reduce on hosts with a slow link between them",
        "hierarchical_allreduce:check",
    ),
    Exercise("compression", _THREE, "Top-k and PowerSGD, with error feedback", "compression:check"),
    Exercise(
        "parameter_server",
        _THREE,
        "Synchronous, stale and asynchronous updates",
        "parameter_server:check",
    ),
    Exercise("ring_attention", _THREE, "Attention around a ring", "ring_attention:check"),
    Exercise("expert_dispatch", _THREE, "Tokens to experts and back", "expert_dispatch:check"),
)

_FOUR = Phase(4, "phase4_production", "Production")
_PHASE_FOUR = (
    Exercise("checkpoint", _FOUR, "A checkpoint that survives kill -9", "checkpoint:check"),
    Exercise("resume", _FOUR, "Resume bit for bit", "resume:check"),
    Exercise(
        "failure_detection", _FOUR, "Tell dead ranks from slow ones", "failure_detection:check"
    ),
    Exercise("rendezvous", _FOUR, "Agree on a new world", "rendezvous:check"),
    Exercise("stragglers", _FOUR, "Name the slow rank", "stragglers:check"),
    Exercise("preemption", _FOUR, "Stop on SIGTERM, and resume", "preemption:check"),
    Exercise("final_system", _FOUR, "Train through kill -9 and newcomers", "final_system:check"),
)

PHASES = (_ONE, _TWO, _THREE, _FOUR)
EXERCISES = (*_PHASE_ONE, *_PHASE_TWO, *_PHASE_THREE, *_PHASE_FOUR)

LABS_FOLDER = Phase(5, "labs", "Clusters of two hosts on this machine (as root)")
LABS = (
    Exercise("lab_ray", LABS_FOLDER, "Ray Train on two nodes, a worker killed", "lab_ray:check"),
    Exercise("lab_horovod", LABS_FOLDER, "Horovod on two nodes", "lab_horovod:check"),
    Exercise("lab_faults", LABS_FOLDER, "A training that survives failures", "lab_faults:check"),
    Exercise("lab_slow", LABS_FOLDER, "Make a slow training fast", "lab_slow:check"),
)


def exercise_named(name: str) -> Exercise:
    """Find an exercise by its name, or by its file's name, as a shell completes it."""
    wanted = Path(name).stem.removeprefix("template_")
    for exercise in (*EXERCISES, *LABS):
        if exercise.name == wanted:
            return exercise
    names = [exercise.name for exercise in (*EXERCISES, *LABS)]
    near = difflib.get_close_matches(wanted, names, n=1)
    remedy = f"did you mean {near[0]}?" if near else "drivetrain learn list shows all names"
    raise ConfigError([Problem("exercise", "no such exercise", remedy, name)])


def phase_numbered(text: str) -> Phase:
    """Find a phase by its number or its folder's name."""
    wanted = text.strip().lower().removeprefix("phase")
    for phase in (*PHASES, LABS_FOLDER):
        if text in (phase.folder, phase.folder + "/") or wanted == str(phase.number):
            return phase
    for exercise in (*EXERCISES, *LABS):
        if exercise.name == text:
            phase = exercise.phase
            remedy = f"copy it with its phase: drivetrain learn start {phase.argument}"
            raise ConfigError([Problem("phase", "is an exercise, not a phase", remedy, text)])
    numbers = ", ".join([*(str(phase.number) for phase in PHASES), LABS_FOLDER.folder])
    raise ConfigError([Problem("phase", "no such phase", f"choose: {numbers}", text)])


def exercises_of(phase: Phase) -> list[Exercise]:
    return [exercise for exercise in (*EXERCISES, *LABS) if exercise.phase == phase]


def solution_scores() -> dict[str, dict[str, float]]:
    """Return the solutions' scores as measured by `make course`, by exercise and quantity."""
    scores: dict[str, dict[str, float]] = _read(COURSE / "scores.yaml")
    return scores
