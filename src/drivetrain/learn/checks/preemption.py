"""Preemption: SIGTERM in the middle of steps and saves, on one rank or both, once or twice.

Every call of the learner's code is a note in the rank's log, so that the events are known even for
ranks that a signal has ended.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.learn.attempt import Outcome, Shortcoming, run_until_killed
from drivetrain.learn.flow import RankRecord
from drivetrain.learn.verdict import Passed

_NUM_RANKS, _NUM_STEPS, _SAVE_EVERY = 2, 6, 4
_REQUEUE = 75
_BOTH = (0, 1)
_STEP, _SAVE, _RETURN = 1, 2, 3
"""What a rank is about to do; it first tells the other rank."""


@dataclass(frozen=True)
class _Case:
    name: str
    in_step: int = 0
    """SIGTERM comes in the middle of this step …"""
    in_save: int = 0
    """… and of the save after this step."""
    ranks: tuple[int, ...] = _BOTH
    folder: str = ""
    """Cases with the same folder: the later one resumes from what the earlier one saved."""

    @property
    def first_asked(self) -> int:
        """The step that is done or running when the signal comes; 0 without one."""
        return self.in_step or self.in_save


_CASES = (
    _Case("no signal"),
    _Case("SIGTERM in step 3, and again in the save after it", 3, 3, folder="stopped"),
    _Case("restarted", folder="stopped"),
    _Case("SIGTERM in step 2, on rank 1 only", 2, ranks=(1,)),
    _Case("SIGTERM in the save after step 4, on rank 0 only", in_save=4, ranks=(0,)),
    _Case("SIGTERM in the last step", _NUM_STEPS),
)


def check(file: Path) -> Passed:
    with tempfile.TemporaryDirectory(prefix="drivetrain-learn-") as folder:
        outcome = run_until_killed(
            file, _play_all, _NUM_RANKS, (folder,), (signal.SIGKILL, signal.SIGTERM)
        )
    for number, case in enumerate(_CASES):
        seen = [_Seen.of(record, number) for record in outcome.records]
        _judge(case, seen, outcome)
    _judge_weights(outcome)
    return Passed(
        [
            "SIGTERM in the middle of a step, on one rank and on both: the step is finished, both"
            " ranks stop after the same step, save it, and return exit code 75",
            "SIGTERM in the middle of a save, and a second one: the save is finished",
            "when restarted, it ends with the weights of a run that was never stopped, bit for bit",
            "SIGTERM in the last step: all steps are done, exit code 0",
        ]
    )


def _play_all(module: Any, recorder: Any, folder: str) -> None:
    for number, case in enumerate(_CASES):
        place = Path(folder) / (case.folder or str(number))
        place.mkdir(exist_ok=True)
        _play(module, _Job(case, number, place, recorder))


def _play(module: Any, job: _Job) -> None:
    signal.signal(signal.SIGTERM, _as_before if job.is_told_apart else signal.SIG_DFL)
    before = signal.getsignal(signal.SIGTERM)
    try:
        code = module.train(job, _SAVE_EVERY)
    except SystemExit as left:
        code = left.code
    job.note(returned=code, is_handler_back=signal.getsignal(signal.SIGTERM) == before)
    if job.is_busy:
        # The other rank waits for the rest of the step: do not let it wait for long.
        os.kill(os.getpid(), signal.SIGKILL)
    job.together(_RETURN)
    job.note(weights=job.weights.tolist())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _as_before(number: int, frame: Any) -> None:
    """The handler of SIGTERM before and after train()."""


class _Job:
    """A small training; records what it is about to do, and sends itself the signals."""

    def __init__(self, case: _Case, number: int, folder: Path, recorder: Any) -> None:
        self.num_steps = _NUM_STEPS
        self.is_busy = False
        self.is_told_apart = case.first_asked == 0
        self._case, self._number, self._recorder = case, number, recorder
        self._signalled: set[str] = set()
        self._file = folder / f"rank-{dist.get_rank()}.pt"
        saved = torch.load(self._file, weights_only=True) if self._file.exists() else {}
        self.step = int(saved.get("step", 0))
        self.weights: torch.Tensor = saved.get("weights", torch.linspace(-1.0, 1.0, 8))

    def one_step(self) -> None:
        if self.step >= self.num_steps:
            raise ValueError(f"all {self.num_steps} steps are done already")
        self.together(_STEP)
        self.is_busy = True
        self.note(begins=self.step + 1)
        gradient = torch.sin(self.weights * (1 + self.step) + dist.get_rank())
        self._signal("step", self._case.in_step == self.step + 1)
        with self._recorder.paused():
            dist.all_reduce(gradient)
        self.weights = self.weights - 0.05 * gradient
        self.step += 1
        self.is_busy = False
        self.note(done=self.step)

    def save(self) -> None:
        self.note(saves=self.step, is_mid_step=self.is_busy)
        if self.is_busy:
            # Enough is known: the other rank is still in the step, and their calls would not match.
            os.kill(os.getpid(), signal.SIGKILL)
        self.together(_SAVE)
        self.is_busy = True
        aside = self._file.with_suffix(".new")
        torch.save({"step": self.step, "weights": self.weights}, aside)
        self._signal("save", self._case.in_save == self.step)
        os.replace(aside, self._file)
        self.is_busy = False
        self.note(saved=self.step)

    def note(self, **values: Any) -> None:
        self._recorder.note(case=self._number, **values)

    def together(self, what: int) -> None:
        """Require that all ranks do the same at the same step; otherwise end them here."""
        mine = torch.tensor([what, self.step])
        everyone = torch.empty(_NUM_RANKS * 2, dtype=torch.int64)
        with self._recorder.paused():
            dist.all_gather_into_tensor(everyone, mine)
        if not torch.equal(everyone.view(_NUM_RANKS, 2), mine.expand(_NUM_RANKS, 2)):
            self.note(parted=everyone.tolist())
            os.kill(os.getpid(), signal.SIGKILL)

    def _signal(self, where: str, is_now: bool) -> None:
        if is_now and where not in self._signalled and dist.get_rank() in self._case.ranks:
            self._signalled.add(where)
            self.note(signalled=where)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.02)


@dataclass
class _Seen:
    """What a rank noted of one case, in order."""

    rank: int
    notes: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, record: RankRecord, number: int) -> _Seen:
        return cls(record.rank, [note for note in record.notes if note["case"] == number])

    def all(self, key: str) -> list[Any]:
        return [note[key] for note in self.notes if key in note]

    def last(self, key: str) -> Any:
        found = self.all(key)
        return found[-1] if found else None


def _judge(case: _Case, seen: Sequence[_Seen], outcome: Outcome) -> None:
    for each in seen:
        _judge_order(case, each)
    for each in seen:
        if each.last("parted"):
            raise _parted(case, each.last("parted"))
    if outcome.ended_by == signal.SIGTERM and any(each.last("returned") is None for each in seen):
        raise _ended(case, seen, [r.rank for r in outcome.records if r.error is None])
    for each in seen:
        _judge_end(case, each)


def _judge_order(case: _Case, seen: _Seen) -> None:
    """Require that nothing begins, ends or is saved in the middle of a step or save."""
    where = f"{case.name}; rank {seen.rank}"
    done = len(seen.all("begins")) == len(seen.all("done"))
    if True in seen.all("is_mid_step"):
        found = f"job.save() was called in the middle of step {seen.last('begins')}"
        expected = "the step is finished first, then saved"
        raise Shortcoming("mid-step", expected, found, where=where)
    if seen.last("returned") is not None and not done:
        found = f"train() ended in the middle of step {seen.last('begins')}"
        raise Shortcoming("mid-step", "the step is finished first", found, where=where)
    if seen.last("returned") is not None and len(seen.all("saves")) > len(seen.all("saved")):
        found = f"train() ended in the middle of the save of step {seen.last('saves')}"
        raise Shortcoming("mid-save", "the save is finished first", found, where=where)


def _parted(case: _Case, codes: list[int]) -> Shortcoming:
    words = {_STEP: "begins step {}", _SAVE: "saves step {}", _RETURN: "returned after step {}"}
    told = [(codes[2 * rank], codes[2 * rank + 1]) for rank in range(_NUM_RANKS)]
    found = [
        f"rank {rank} {words[what].format(step + (what == _STEP))}"
        for rank, (what, step) in enumerate(told)
    ]
    expected = "all ranks do the same at the same time, and stop after the same step"
    return Shortcoming("not-agreed", expected, "\n".join(found), where=case.name)


def _ended(case: _Case, seen: Sequence[_Seen], silent: Sequence[int]) -> Shortcoming:
    """Return the Shortcoming for a rank that SIGTERM ended; it left no error, unlike the others."""
    who = " or ".join(str(each.rank) for each in seen if each.rank in silent)
    if any(len(each.all("signalled")) > 1 for each in seen):
        expected = "a second SIGTERM, in the save, changes nothing"
        return Shortcoming("second-signal", expected, f"it ended rank {who}", where=case.name)
    expected = "no rank is ended by SIGTERM"
    found = f"it ended rank {who}, as it ends every process without a handler"
    return Shortcoming("killed", expected, found, where=case.name)


def _judge_end(case: _Case, seen: _Seen) -> None:
    where = f"{case.name}; rank {seen.rank}"
    code, done, saved = seen.last("returned"), seen.last("done"), seen.last("saved")
    is_stopped = 0 < case.first_asked < _NUM_STEPS
    if is_stopped and done > case.first_asked + 1:
        expected = f"no more than one step after SIGTERM, which came at step {case.first_asked}"
        found = f"stopped after step {done}"
        raise Shortcoming("late", expected, found, where=where)
    if saved != done:
        expected = f"step {done}, the last one done, is saved"
        found = "nothing was saved" if saved is None else f"the last saved step is {saved}"
        raise Shortcoming("not-saved", expected, found, where=where)
    if not is_stopped and _SAVE_EVERY not in seen.all("saved") and not case.folder:
        expected = f"saved after step {_SAVE_EVERY} too: every {_SAVE_EVERY} steps"
        found = f"saved after {seen.all('saved')}"
        raise Shortcoming("not-saved", expected, found, where=where)
    _judge_code(code, is_stopped, case, where)
    if not seen.last("is_handler_back"):
        expected = "after train(), SIGTERM does what it did before"
        raise Shortcoming(
            "handler-left", expected, "train()'s own handler is still installed", where=where
        )


def _judge_code(code: Any, is_stopped: bool, case: _Case, where: str) -> None:
    if is_stopped and code != _REQUEUE:
        hint = "exit-code" if code in (0, None) else "exit-code-failed"
        expected = f"exit code {_REQUEUE}: saved, to be restarted"
        raise Shortcoming(hint, expected, f"exit code {code}", where=where)
    if not is_stopped and code != 0:
        hint = "done-is-done" if case.first_asked else "exit-code-failed"
        expected = "exit code 0: every step is done"
        raise Shortcoming(hint, expected, f"exit code {code}", where=where)


def _judge_weights(outcome: Outcome) -> None:
    """Compare the run that was stopped and restarted with the one that was not."""
    for record in outcome.records:
        whole, resumed = _Seen.of(record, 0), _Seen.of(record, 2)
        if whole.last("weights") != resumed.last("weights"):
            steps = f"steps {whole.all('done')}, and {resumed.all('done')} after the restart"
            expected = "the weights of a run that was never stopped"
            where = f"{_CASES[2].name}; rank {record.rank}"
            raise Shortcoming("not-resumed", expected, f"different weights; {steps}", where=where)
