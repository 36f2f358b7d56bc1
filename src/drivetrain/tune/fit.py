"""Fit: asks the planner whether a trial can run at all, before it is started.

The answer is a function of the script, the trial's values and the named cluster, so every driver
gets the same one. Trials that differ only in the optimizer's numbers share one answer.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from drivetrain.core.bounded import read_json
from drivetrain.core.text import readable_bytes
from drivetrain.launch.job import Job
from drivetrain.plan.prospect import Asking, Prospect
from drivetrain.tune.decide import Work
from drivetrain.tune.journal import Asked, Ended
from drivetrain.tune.perturb import MUTABLE
from drivetrain.tune.settings import Study

_LONGEST_S = 600.0


@dataclass
class Planner:
    """Predictions for the trials of one study, one per kind of trial."""

    study: Study
    say: Callable[[str], None] = lambda _: None
    _known: dict[str, Prospect] = field(default_factory=dict)
    _is_silent: bool = False

    def prospect(self, asked: Asked, job: Job) -> Prospect:
        """Predict what a trial would take; runs its script up to `Trainer.fit`."""
        others = {key: value for key, value in asked.values.items() if key not in MUTABLE}
        kind = json.dumps(others, sort_keys=True)
        if kind not in self._known:
            self._known[kind] = self._asked(job)
        found = self._known[kind]
        if found.unknown and not self._is_silent:
            self._is_silent = True
            self.say(f"the planner cannot predict trials ({found.unknown}); all are started")
        return found

    def _asked(self, job: Job) -> Prospect:
        settings = self.study.settings
        asking = Asking(
            settings.script,
            job.script_args,
            settings.nodes_per_trial,
            settings.processes_per_trial,
            settings.cluster,
        )
        with tempfile.TemporaryDirectory(prefix="drivetrain-fit-") as folder:
            output = Path(folder) / "prospect.json"
            said = json.dumps(asdict(asking))
            command = [sys.executable, "-m", "drivetrain.plan.of_config", str(output), said]
            try:
                done = subprocess.run(  # noqa: S603
                    command, capture_output=True, text=True, check=False, timeout=_LONGEST_S
                )
            except subprocess.TimeoutExpired:
                return Prospect(unknown=f"no answer after {_LONGEST_S:.0f} s")
            if not output.exists():
                last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
                return Prospect(unknown=last[0][:200])
            return Prospect(**read_json(output))


def refusal(work: Work, prospect: Prospect, cluster: str) -> Ended | None:
    """The journal entry of a trial that cannot fit; None if it can, or if that is unknown."""
    if prospect.fits or prospect.memory_bytes is None or prospect.limit_bytes is None:
        return None
    needs, limit = readable_bytes(prospect.memory_bytes), readable_bytes(prospect.limit_bytes)
    reason = f"needs {needs} per rank; only {limit} is available on {cluster}"
    return Ended(work.trial, work.rung, "too_large", reason=reason)
