"""The parity certificate: does your script train the same under a layout as on one process?

Each run reports its losses and gradient norms, and a `Trace` of its first steps: the effect of a
bug on one parameter shows there long before it shows in a loss. Where losses diverge later than
that, the reference runs again with the last bits of its gradients changed: a script that diverges
from itself gives no information about a layout. If it does not diverge, both run once more with a
longer trace, which shows where the difference began.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from drivetrain.config.giving_way import forced_by, gave_way
from drivetrain.config.keys import flatten
from drivetrain.config.script_parser import settings_problem
from drivetrain.core.errors import ConfigError, WorkerFailure
from drivetrain.verify.parity.compare import (
    TOLERANCES,
    Divergence,
    Numbers,
    Parting,
    StepNumbers,
    Tolerance,
    agreed_before,
    first_parting,
    lacks_gradients,
    largest_deviations,
    locate,
)
from drivetrain.verify.parity.layouts import ONE_PROCESS, UNDIVIDED, AskedLayout
from drivetrain.verify.parity.micro_batches import (
    SizeDependence,
    differ_under_auto,
    grows_with_size,
    shared_micro_batch,
)
from drivetrain.verify.parity.trace import FOLDER, LAST_STEP, TraceEntry, read_trace
from drivetrain.verify.scalars import step_scalars

_TRACE = "drivetrain.verify.parity.trace:Trace"
_NUDGED = "drivetrain.verify.parity.trace:Nudged"
_NO_DROPOUT = "drivetrain.verify.parity.trace:WithoutDropout"
TRACED_STEPS = 3
"""Steps traced in every run: the second starts from updated weights, the third from a used
optimizer state."""
_AS_FAR = 10.0
"""A layout may deviate this many times as far as the reference from itself, which is one draw."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Itself:
    """How one process diverges from itself when the last bits of its gradients are changed."""

    loss_deviation: float
    norm_deviation: float
    parting: Parting | None

    def explains(self, parting: Parting, loss_deviation: float) -> bool:
        """Whether this alone may explain a layout's late divergence."""
        return (
            self.parting is not None
            and parting.step > TRACED_STEPS
            and loss_deviation <= _AS_FAR * self.loss_deviation
        )


@dataclass(frozen=True)
class LayoutResult:
    """One layout compared with the reference."""

    layout: AskedLayout
    loss_deviation: float = float("nan")
    """Largest relative deviation of any step."""
    norm_deviation: float = float("nan")
    parting: Parting | None = None
    divergence: Divergence | None = None
    """Where it began; None if nothing differs, or if the traces do not show it."""
    itself: Itself | None = None
    """Set if the script diverges from itself as far: the comparison ends there."""
    agreed: float | None = None
    """Set if rounding may explain a late difference: the largest deviation of a loss before."""
    lacks_gradients: bool = False
    """An engine or servers handle them: outputs, losses and norms were compared."""
    problem: str = ""
    """Why the layout could not be run."""

    @property
    def holds(self) -> bool:
        is_same = self.parting is None or self.itself is not None
        return is_same and self.divergence is None and not self.problem

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "divergence": None if self.divergence is None else self.divergence.to_dict(),
            "holds": self.holds,
        }


@dataclass(frozen=True)
class ParityCertificate:
    """What was compared, with which tolerance, and the results."""

    script: str
    steps: int
    precision: str
    tolerance: Tolerance
    notes: tuple[str, ...]
    results: tuple[LayoutResult, ...]
    depends_on_size: SizeDependence | None = None
    """Set if micro_batch_size is auto, and the training depends on it."""

    @property
    def layouts_hold(self) -> bool:
        """Whether every layout trains the same as one process, at the same micro-batch size."""
        return all(result.holds for result in self.results)

    @property
    def holds(self) -> bool:
        """Whether every layout trains the same as one process, as the script is configured."""
        return self.layouts_hold and self.depends_on_size is None

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "results": [result.to_dict() for result in self.results],
            "layouts_hold": self.layouts_hold,
            "holds": self.holds,
        }


@dataclass(frozen=True)
class Runner:
    """Runs the script under one layout after another, each in its own folder."""

    argv: tuple[str, ...]
    settings: tuple[str, ...]
    scratch: Path
    num_threads: int
    """The same for every layout: a different number of threads rounds differently."""
    hooks: str = _TRACE

    def run(self, layout: AskedLayout, last_traced: int = TRACED_STEPS) -> Ran:
        """Run it; WorkerFailure with the end of the script's output if it fails.

        ConfigError if the script's own parser rejects the arguments that are added here.
        """
        made = len(list(self.scratch.glob("[0-9]*")))
        folder = self.scratch / f"{made:03d}"
        folder.mkdir()
        others = os.environ.get("DRIVETRAIN_HOOKS")
        environment = {
            **os.environ,
            **forced_by(self.settings),
            "OMP_NUM_THREADS": str(self.num_threads),
            "DRIVETRAIN_HOOKS": f"{others},{self.hooks}" if others else self.hooks,
            FOLDER: str(folder / "trace"),
            LAST_STEP: str(last_traced),
        }
        command = [sys.executable, "-m", "drivetrain", "train", f"--run-dir={folder / 'run'}"]
        command += [f"--nproc-per-node={layout.num_ranks}", "--max-restarts=0", "--spares=0"]
        command += self.argv
        command += UNDIVIDED if layout.names_all_axes else ()
        with open(folder / "output.txt", "w") as output:
            result = subprocess.run(
                [*command, *self.settings, *layout.overrides],
                env=environment,
                stdout=output,
                stderr=output,
                check=False,
            )
        if result.returncode == ConfigError.exit_code:
            problem = settings_problem(self.argv[0], self.settings)
            if problem is not None:
                raise ConfigError([problem])
        if result.returncode:
            tail = (folder / "output.txt").read_text().strip()[-1500:]
            raise WorkerFailure(f"{layout.name}: exit code {result.returncode}\n{tail}")
        return Ran(folder)


@dataclass(frozen=True)
class Ran:
    """A finished run."""

    folder: Path

    @cached_property
    def numbers(self) -> Numbers:
        """What the run reported for each step."""
        return read_numbers(self.folder / "run")

    @cached_property
    def traces(self) -> dict[int, list[TraceEntry]]:
        """Rank → its trace; empty for a script with its own loop."""
        paths = sorted((self.folder / "trace").glob("trace-*.jsonl"))
        return {int(path.stem.partition("-")[2]): read_trace(path) for path in paths}

    def config(self) -> tuple[dict[str, Any], dict[str, str]]:
        """The resolved config, and where each value came from."""
        document = yaml.safe_load((self.folder / "run" / "run.yaml").read_text())
        return document["config"], document["sources"]


def certify_parity(
    argv: tuple[str, ...], layouts: Sequence[AskedLayout], steps: int, say: Say
) -> ParityCertificate:
    """Run the script on one process, then under each layout, and compare."""
    widest = max(layout.num_ranks for layout in layouts)
    threads = max(1, (os.cpu_count() or 1) // widest)
    settings = (
        f"max_steps={steps}",
        "record.logging_steps=1",
        "record.sinks=[]",
        "checkpoint.every_steps=null",
        "sentinel.every_steps=null",  # differing copies are found here, and must not stop the run
    )
    with tempfile.TemporaryDirectory(prefix="parity-") as scratch:
        runner = Runner(argv, settings, Path(scratch), threads)
        notes = []
        if any(layout.divides_the_model for layout in layouts):
            notes.append(
                "dropout is off: ranks that share a model draw masks only for their own part"
            )
            runner = replace(runner, hooks=f"{_TRACE},{_NO_DROPOUT}")
        say("1 process")
        reference = at_auto = runner.run(ONE_PROCESS)
        config, sources = reference.config()
        notes += [f"{key} = {_value(config, key)}, {why}" for key, why in gave_way(sources)]
        chosen, fixed = int(config["micro_batch_size"]), None
        # a batch sampler's size is chosen, too, but not by the number of ranks
        if sources["micro_batch_size"].startswith("chosen") and chosen == int(
            config["global_batch_size"]
        ):
            fixed = shared_micro_batch(chosen, widest)
            notes.append(f"micro_batch_size is auto; fixed at {fixed} for every layout")
            runner = replace(runner, settings=(*settings, f"micro_batch_size={fixed}"))
        if fixed not in (None, chosen):
            reference = runner.run(ONE_PROCESS)
        said = config["precision"]
        precision = "float8" if said.get("float8", "none") != "none" else str(said["dtype"])
        allowed = TOLERANCES[precision]
        if not reference.traces:
            notes.append(
                "the script has its own loop, which is not traced: losses and gradient norms are "
                "compared, not the gradient of each parameter"
            )
            allowed = replace(allowed, judges_traces=False)
        compared = Compared(runner, reference, allowed)
        depends = None
        if fixed is not None and differ_under_auto(layouts):
            depends = _dependence(compared, fixed, at_auto, chosen)
        results = []
        for layout in layouts:
            say(layout.name)
            results.append(_certify_layout(compared, layout))
    return ParityCertificate(
        argv[0], steps, precision, allowed, tuple(notes), tuple(results), depends
    )


@dataclass(frozen=True)
class Compared:
    """The reference that layouts are compared with."""

    runner: Runner
    reference: Ran
    allowed: Tolerance

    @cached_property
    def is_bitwise(self) -> bool:
        """Whether the script's own config rules out differences by rounding."""
        return bool(self.reference.config()[0]["reproducibility"] == "bitwise")

    @cached_property
    def itself(self) -> Itself:
        """The reference compared with itself; runs on first use."""
        nudged = replace(self.runner, hooks=f"{self.runner.hooks},{_NUDGED}").run(ONE_PROCESS)
        expected, here = self.reference.numbers, nudged.numbers
        parting = first_parting(expected, here, self.allowed)
        return Itself(*largest_deviations(expected, here), parting)

    def traced_to(self, layout: AskedLayout, step: int) -> Divergence | None:
        """Run both once more with traces up to `step`, and locate the difference."""
        longer = self.runner.run(ONE_PROCESS, step).traces.get(0, [])
        return locate(longer, self.runner.run(layout, step).traces, self.allowed)


def _value(config: dict[str, Any], key: str) -> Any:
    value = flatten(config)[key]
    return "null" if value is None else value


def _dependence(compared: Compared, fixed: int, at_auto: Ran, size: int) -> SizeDependence | None:
    """Compare one process with itself at the size that `auto` chooses for it."""
    expected, here = compared.reference.numbers, at_auto.numbers
    parting = first_parting(expected, here, compared.allowed)
    if parting is None:
        return None
    if parting.step > TRACED_STEPS:
        deviation, _ = largest_deviations(expected, here)
        if compared.itself.explains(parting, deviation):
            return None
    return SizeDependence(fixed, size, parting, is_sum=grows_with_size(fixed, expected, size, here))


def _certify_layout(compared: Compared, layout: AskedLayout) -> LayoutResult:
    reference, allowed = compared.reference, compared.allowed
    try:
        here = compared.runner.run(layout)
        expected, numbers, traces = reference.numbers, here.numbers, here.traces
        deviations = largest_deviations(expected, numbers)
        parting = first_parting(expected, numbers, allowed)
        divergence = None
        if parting is not None or allowed.judges_traces:
            divergence = locate(reference.traces.get(0, []), traces, allowed)
        if parting is not None and divergence is None and parting.step > TRACED_STEPS:
            if compared.itself.explains(parting, deviations[0]):
                return LayoutResult(layout, *deviations, parting, itself=compared.itself)
            divergence = compared.traced_to(layout, parting.step)
    except WorkerFailure as failure:
        return LayoutResult(layout, problem=str(failure))
    unseen = lacks_gradients(traces)
    agreed = None
    if parting is not None and parting.step > TRACED_STEPS and not compared.is_bitwise:
        agreed = agreed_before(parting, divergence, expected, numbers)
    return LayoutResult(
        layout, *deviations, parting, divergence, agreed=agreed, lacks_gradients=unseen
    )


def read_numbers(run: Path) -> Numbers:
    """Loss and gradient norm by step."""
    return {
        step: StepNumbers(float(values["train/loss"]), values.get("train/grad_norm"))
        for step, values in step_scalars(run).items()
    }
