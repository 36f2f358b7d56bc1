"""Lab: a training on two hosts that must end as if no failure had happened."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drivetrain.learn.attempt import Shortcoming
from drivetrain.learn.labs import NUM_HOSTS, require_hosts, why_it_failed
from drivetrain.learn.verdict import Passed, Score
from drivetrain.testing.hosts import Hosts, make_hosts
from drivetrain.verify.drills.drill import (
    DrillOutcome,
    Reference,
    Setting,
    read_samples,
    run_drill,
    run_reference,
)
from drivetrain.verify.drills.faults import Faults
from drivetrain.verify.drills.template import Template

NUM_STEPS = 40
MOST_AGAIN = 10
"""Steps that one failure may cost."""
_CURVE = "curve.csv"
_FINISH_S = 300.0
"""Far more than a run takes, so that a busy machine does not fail a learner."""
_ALL_RUNS = (
    ("nothing", Faults()),
    ("a rank is killed in step 12", Faults().kill_at(12, rank=1)),
    ("a rank is killed while a checkpoint is written", Faults().kill_at(14, point="save")),
    ("a host crashes in step 16, and comes back", Faults().kill_node(16, host=1)),
    ("the network between the hosts is cut for three seconds", Faults().partition_at(18)),
    ("a host is preempted in step 20 (SIGTERM)", Faults().preempt_at(20, host=1)),
)


def check(file: Path) -> Passed:
    require_hosts("lab_faults")
    with (
        tempfile.TemporaryDirectory(prefix="lab-", ignore_cleanup_errors=True) as name,
        make_hosts(NUM_HOSTS) as hosts,
        _templates(Path(name), hosts) as templates,
    ):
        setting = Setting((str(file),), ranks=1, templates=templates)
        reference = _undisturbed(setting, Path(name) / "reference", hosts)
        recovered, done = [], 0
        for number, (what, faults) in enumerate(_ALL_RUNS):
            folder = Path(name) / f"run-{number}"
            outcome = run_drill(setting, faults, reference, folder, hosts, _FINISH_S)
            steps = steps_done(folder)
            judge(what, outcome, steps, curve_of(folder / "run" / _CURVE))
            done += steps
            recovered += [f"{what}: {s:.1f} s" for s in outcome.recovery_s]
    limit = NUM_STEPS * len(_ALL_RUNS)
    return Passed(
        [
            f"{len(_ALL_RUNS) - 1} failures on {NUM_HOSTS} hosts: each time the weights of the"
            f" undisturbed run, bit for bit, every sample used once, every step in {_CURVE}",
            "from a failure to the next checkpoint: " + "; ".join(recovered),
        ],
        [Score("steps done, with those done again", done, limit, "one each", "steps")],
    )


@contextmanager
def _templates(folder: Path, hosts: Hosts) -> Iterator[tuple[Template, ...]]:
    """Processes on each host that have imported everything, so that a run starts in a second."""
    templates = tuple(Template(folder, host) for host in hosts)
    try:
        yield templates
    finally:
        for template in templates:
            template.close()


def _undisturbed(setting: Setting, folder: Path, hosts: Hosts) -> Reference:
    try:
        return run_reference(setting, folder, hosts, _FINISH_S)
    except RuntimeError as error:
        raise why_it_failed(str(error).replace("\\n", "\n"), 1) from error


def steps_done(folder: Path) -> int:
    """Count the steps of all attempts; a repeated step counts again."""
    return len(read_samples(folder))


def curve_of(file: Path) -> list[int]:
    """Return the steps in the curve that the script writes."""
    if not file.is_file():
        return []
    lines = [line.split(",")[0] for line in file.read_text().splitlines()]
    return [int(step) for step in lines if step.isdigit()]


def judge(what: str, outcome: DrillOutcome, num_done: int, curve: list[int]) -> None:
    """Raise the Shortcoming of one run, if there is one."""
    is_disturbed = bool(outcome.faults)
    if outcome.problems:
        found = "\n".join(outcome.problems)
        if "weights are not those" not in found:
            raise Shortcoming("not-recovered", "the run finishes", found, where=what)
        hint = "state-lost" if is_disturbed else "not-repeatable"
        expected = "the weights of the undisturbed run"
        if not is_disturbed:
            expected = "two runs of the same command end with the same weights"
        raise Shortcoming(hint, expected, outcome.problems[0], where=what)
    again = num_done - NUM_STEPS
    if again > MOST_AGAIN * max(1, len(outcome.faults)):
        raise Shortcoming(
            "steps-lost",
            f"a failure costs at most {MOST_AGAIN} steps",
            f"{again} steps were repeated",
            where=what,
        )
    if curve != list(range(1, NUM_STEPS + 1)):
        twice = sorted({step for step in curve if curve.count(step) > 1})
        missing = [step for step in range(1, NUM_STEPS + 1) if step not in curve]
        raise Shortcoming(
            "curve",
            f"{_CURVE} in the run's directory has each of the {NUM_STEPS} steps once, in order",
            f"{len(curve)} lines; more than once: {twice or 'none'}; missing: {missing or 'none'}",
            where=what,
        )
