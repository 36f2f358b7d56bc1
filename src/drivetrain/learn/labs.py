"""Shared by the labs: what they require of a machine, and how a training's notes are judged."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from subprocess import Popen, TimeoutExpired

from drivetrain.core.errors import EnvironmentProblem, Problem
from drivetrain.learn.attempt import Shortcoming
from drivetrain.learn.notes import Attempt, Note
from drivetrain.learn.training import on_one_process
from drivetrain.testing.hosts import hosts_available
from drivetrain.verify.parity.compare import TOLERANCES, relative

NUM_HOSTS = 2
_TODO = re.compile(r"NotImplementedError: (TODO[^\n\\]*)")
_TAIL = 12


def require_hosts(lab: str) -> None:
    """Require that hosts can be created; EnvironmentProblem names what is missing."""
    if reason := hosts_available():
        remedy = "it creates two hosts, which needs Linux, root and iproute2"
        raise EnvironmentProblem([Problem(lab, reason, remedy, has_value=False)])


def require_library(lab: str, name: str, remedy: str) -> None:
    if find_spec(name) is None:
        rule = f"{name} is not installed"
        raise EnvironmentProblem([Problem(lab, rule, remedy, has_value=False)])


def exit_code(process: Popen[str], within_s: float) -> int | None:
    """Return the exit code, or None if the process has not ended in time."""
    try:
        return process.wait(within_s)
    except TimeoutExpired:
        return None


def why_it_failed(output: str, code: int | None) -> Shortcoming:
    """Return the Shortcoming from a script's output: the TODO it reached, or its last lines."""
    met = _TODO.search(output)
    if met is not None:
        found = f"{met[1].strip()} is still to be written"
        return Shortcoming("todo", "every TODO replaced by code", found)
    ending = "it did not finish in time" if code is None else f"exit code {code}"
    last = "\n".join(line for line in output.splitlines() if line.strip())
    lines = last.splitlines()[-_TAIL:]
    return Shortcoming("crash", "the training runs to its end", "\n".join([ending, *lines]))


def judge_ranks(attempt: Attempt, num_ranks: int, is_on_hosts: bool = True) -> None:
    """Require `num_ranks` ranks, each on its own host, with equal weights after every step."""
    sizes = {each.num_ranks for notes in attempt.values() for each in notes}
    if sorted(attempt) != list(range(num_ranks)) or sizes != {num_ranks}:
        ranks = ", ".join(str(rank) for rank in sorted(attempt)) or "none"
        raise Shortcoming(
            "wrong-size",
            f"{num_ranks} ranks, each of which sees a world size of {num_ranks}",
            f"ranks that trained: {ranks}; world sizes that they saw: {sorted(sizes)}",
        )
    hosts = {notes[0].host for notes in attempt.values()}
    if is_on_hosts and len(hosts) < num_ranks:
        found = f"all ranks are on {', '.join(sorted(hosts))}"
        raise Shortcoming("one-node", "every rank on its own host", found)
    together = list(zip(*attempt.values(), strict=False))
    if together and all(len({each.loss for each in notes}) == 1 for notes in together):
        found = f"all ranks have the same loss in each of {len(together)} steps"
        raise Shortcoming("same-samples", "every rank has different samples", found)
    for notes in together:
        if len({each.weights for each in notes}) > 1:
            found = f"the weights differ after step {notes[0].step}"
            raise Shortcoming("ranks-differ", "equal weights on all ranks after each step", found)


def judge_losses(attempt: Attempt, num_steps: int, hint: str, where: str) -> None:
    """The ranks' parts are equally large, so the mean of their losses is the batch's."""
    reference, _ = on_one_process(num_steps)
    for notes in zip(*attempt.values(), strict=False):
        step = notes[0].step
        loss = sum(each.loss for each in notes) / len(notes)
        if not relative(loss, reference[step].loss) < TOLERANCES["fp32"].loss:
            raise Shortcoming(
                hint,
                f"step {step}: loss {reference[step].loss:.5f}, as on one process",
                f"step {step}: {loss:.5f}",
                where=where,
            )


def last_step(notes: Sequence[Note]) -> int:
    return max((each.step for each in notes), default=0)
