"""The learner's four parts together: two members killed, one that joins, the losses of one process.

Gradients are sent through the store, so that a waiting step can be abandoned. The process group is
for the learner's checkpoint, whose save has barriers.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from drivetrain.learn.attempt import Shortcoming, in_this_process, load
from drivetrain.learn.exact import NUM_MICRO, ExactJob
from drivetrain.learn.exercises import exercise_named
from drivetrain.learn.members import Members, new_store, wait_until
from drivetrain.learn.verdict import Passed, Score

_PARTS = ("checkpoint", "resume", "failure_detection", "rendezvous")
_NUM_STEPS, _SAVE_EVERY = 28, 5
_STEP_S = 0.05
_PATIENCE_S = 12.0
_DEAD_S, _QUIET_S = 1.5, 0.6
"""The values in the template."""
_MOST_WORLDS = 8
"""Four are needed; on a busy machine some may be formed twice."""


def check(file: Path) -> Passed:
    files = {name: str(_file_of(name, file)) for name in _PARTS}
    for path in (file, *map(Path, files.values())):
        _require_done(path)
    right = in_this_process(Path(files["resume"]), _undisturbed)
    # On a busy machine a living member may be taken for dead; a wrong solution fails each time.
    for tries_left in (1, 0):
        try:
            recovered_s = _disturbed(file, files, right)
            break
        except Shortcoming as found:
            if tries_left == 0 or found.hint != "false-alarm":
                raise
    return Passed(
        [
            "3 processes train; one is killed with -9, one joins, one more is killed: 2 finish",
            f"all {_NUM_STEPS} losses, and the weights, are those of one process, bit for bit",
            f"no failure costs more than the {_SAVE_EVERY} steps between two saves",
        ],
        [
            Score(
                "from kill -9 to the next step",
                round(recovered_s, 2),
                _DEAD_S + _QUIET_S,
                "dead_after_s + quiet_s",
                "s",
            )
        ],
    )


def _file_of(name: str, file: Path) -> Path:
    """Return the learner's file in the same folder, or the solution if there is none."""
    for candidate in (f"template_{name}.py", f"{name}.py"):
        if (file.parent / candidate).is_file():
            return file.parent / candidate
    return exercise_named(name).solution


def _require_done(path: Path) -> None:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip().startswith("raise NotImplementedError("):
            found = f"{path.name}:{number} is still to be written"
            raise Shortcoming(
                "todo", "this exercise, and the four that it uses, without TODOs", found
            )


def _undisturbed(resume: Any) -> tuple[list[float], list[float]]:
    """Return losses and weights of one process."""
    job = ExactJob()
    losses = []
    while job.step < _NUM_STEPS:
        losses.append(job.apply(torch.stack([job.row(resume, m) for m in range(NUM_MICRO)])))
    return losses, job.weights


class Interrupted(Exception):
    """A step was abandoned."""


class _Job(ExactJob):
    """What a member trains; reports what it does to the store, for the check."""

    Interrupted = Interrupted

    def __init__(self, store: Any, name: str, resume: Any) -> None:
        super().__init__()
        self.num_steps, self.save_every = _NUM_STEPS, _SAVE_EVERY
        self.losses: dict[int, float] = {}
        self._store, self._name, self._resume = new_store(store.port), name, resume
        self._number = self._rank = self._num_ranks = 0

    def connect(self, number: int, rank: int, num_ranks: int) -> None:
        if dist.is_initialized():
            raise ValueError("already connected: call disconnect() first")
        self._number, self._rank, self._num_ranks = int(number), int(rank), int(num_ranks)
        self._store.set(f"joined/{number}/{self._name}", f"{rank} {num_ranks}")
        dist.init_process_group(
            "gloo",
            store=PrefixStore(f"gloo/{number}", self._store),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=_PATIENCE_S / 2),
        )

    def disconnect(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store.set(f"left/{self._number}/{self._name}", "1")

    def one_step(self, is_over: Callable[[], bool]) -> None:
        if self.step >= self.num_steps:
            raise ValueError(f"all {self.num_steps} steps are done already")
        here = f"{self._number}/{self.step}"
        if not self._store.check([f"begin/{self._number}/{self._name}"]):
            self._store.set(f"begin/{self._number}/{self._name}", f"{self.step} {time.time()}")
        self._store.set(f"at/{self._name}", f"{self._number} {self.step}")
        for micro in range(self._rank, NUM_MICRO, self._num_ranks):
            row = self.row(self._resume, micro).numpy().tobytes().hex()
            self._store.set(f"row/{here}/{micro}", row)
        time.sleep(_STEP_S)
        keys = [f"row/{here}/{micro}" for micro in range(NUM_MICRO)]
        while not self._store.check(keys):
            if is_over():
                raise Interrupted(f"step {self.step + 1} was abandoned")
            time.sleep(0.02)
        read = [bytes.fromhex(self._store.get(key).decode()) for key in keys]
        rows = torch.from_numpy(np.stack([np.frombuffer(each, np.float32) for each in read]))
        number = self.step + 1
        self.losses[number] = self.apply(rows)


def _member(
    module: Any, store: Any, name: str, folder: str, files: dict[str, str]
) -> tuple[dict[int, float], list[float]]:
    torch.set_num_threads(1)
    parts = SimpleNamespace(**{part: load(Path(path)) for part, path in files.items()})
    job = _Job(store, name, parts.resume)
    store.set(f"ready/{name}", "1")
    store.wait([f"go/{name}"], timedelta(seconds=90))
    module.train(parts, store, name, Path(folder), job)
    return job.losses, job.weights


@dataclass(frozen=True)
class _World:
    """A world as its members see it."""

    number: int
    ranks: dict[str, int]
    begins: dict[str, tuple[int, float]]
    """The step at which each member began, and when."""


def _disturbed(file: Path, files: dict[str, str], right: tuple[list[float], list[float]]) -> float:
    """Return the seconds from the first kill to the next step."""
    with tempfile.TemporaryDirectory(prefix="drivetrain-learn-") as name, Members(file) as members:
        play = _Play(members, name, files)
        play.start_all("abcd")
        play.let_in("abc")
        first = play.world_of("abc", 0, "3 processes join", "left-out")
        lost = _with_rank(0, first)
        where = f"{lost} was killed"
        killed_s, reached = play.kill(lost, 7)
        others = "abc".replace(lost, "")
        second = play.world_of(others, first.number, where, "not-detected")
        play.judge_begin(second, reached, where)
        recovered_s = min(begin_s for _, begin_s in second.begins.values()) - killed_s
        play.wait_for_step(others, 12)
        play.let_in("d")
        third = play.world_of(f"{others}d", second.number, "d joins", "not-noticed")
        play.judge_begin(third, 12, "d joins")
        lost = _whose_rank_was_anothers(third, (first, second))
        where = f"{lost} was killed too"
        _, reached = play.kill(lost, 17)
        rest = f"{others}d".replace(lost, "")
        fourth = play.world_of(rest, third.number, where, "old-heartbeat")
        play.judge_begin(fourth, reached, where)
        play.judge_end(rest, right)
        return recovered_s


def _with_rank(rank: int, world: _World) -> str:
    return next(name for name, its in world.ranks.items() if its == rank)


def _whose_rank_was_anothers(world: _World, earlier: Sequence[_World]) -> str:
    """Find a member whose death a heartbeat left running by another would hide; one exists."""
    return next(
        name
        for name, rank in world.ranks.items()
        if any(
            before.ranks.get(other) == rank
            for before in earlier
            for other in world.ranks
            if other != name
        )
    )


class _Play:
    """Controls and observes the members."""

    def __init__(self, members: Members, folder: str, files: dict[str, str]) -> None:
        self._members, self._store = members, members.store
        self._folder, self._files = folder, files

    def start_all(self, names: str) -> None:
        """Start the processes in advance, so that each can join immediately."""
        for name in names:
            self._members.start(name, _member, name, self._folder, self._files)
        ready = [f"ready/{name}" for name in names]
        wait_until(lambda: self._store.check(ready), 5 * _PATIENCE_S)

    def let_in(self, names: str) -> None:
        for name in names:
            self._store.set(f"go/{name}", "1")

    def world_of(self, names: str, after: int, where: str, hint: str) -> _World:
        """Return the first world later than `after` in which exactly these members train."""
        found: list[_World] = []

        def is_there() -> bool:
            self._failed(where)
            for number in range(after + 1, _MOST_WORLDS + 1):
                world = self._read(number, names)
                if world is not None:
                    found.append(world)
                    return True
            return False

        if not wait_until(is_there, _PATIENCE_S):
            raise self._no_world(names, after, where, hint)
        return found[0]

    def _failed(self, where: str) -> None:
        try:
            self._members.failed()
        except Shortcoming as found:
            if "FileNotFoundError" in found.found:
                expected = "a checkpoint of one world can be loaded by all members of the next"
                raise Shortcoming("resized", expected, found.found, where=where) from found
            raise

    def _read(self, number: int, names: str) -> _World | None:
        store = self._store
        keys = [f"{what}/{number}/{name}" for what in ("joined", "begin") for name in names]
        if not store.check(keys):
            return None
        texts = {key: store.get(key).decode().split() for key in keys}
        sizes = {int(texts[f"joined/{number}/{name}"][1]) for name in names}
        if sizes != {len(names)}:
            return None
        begins = {name: texts[f"begin/{number}/{name}"] for name in names}
        return _World(
            number,
            {name: int(texts[f"joined/{number}/{name}"][0]) for name in names},
            {name: (int(step), float(begin_s)) for name, (step, begin_s) in begins.items()},
        )

    def _no_world(self, names: str, after: int, where: str, hint: str) -> Shortcoming:
        store = self._store
        left = [name for name in names if store.check([f"left/{after}/{name}"])]
        latest = {name: self._latest(name) for name in names}
        shown = "\n".join(f"{name}: {text}" for name, (_, text) in latest.items())
        if min(number for number, _ in latest.values()) >= _MOST_WORLDS:
            hint = "false-alarm"
        elif hint in ("not-detected", "old-heartbeat") and left:
            hint = "never-enough"
        elif len({number for number, _ in latest.values()}) == 1 and latest[names[0]][0] > after:
            hint = "too-late"
        expected = f"{', '.join(names)} train together within {_PATIENCE_S:g} s"
        return Shortcoming(hint, expected, shown, where=where)

    def _latest(self, name: str) -> tuple[int, str]:
        for number in range(3 * _MOST_WORLDS, 0, -1):
            if self._store.check([f"joined/{number}/{name}"]):
                rank, num_ranks = self._store.get(f"joined/{number}/{name}").decode().split()
                gone = ", and has left it" if self._store.check([f"left/{number}/{name}"]) else ""
                return number, f"rank {rank} of {num_ranks} in world {number}{gone}"
        return 0, "in no world yet"

    def kill(self, name: str, at_step: int) -> tuple[float, int]:
        """Kill a member once it reaches `at_step`; return the time and its step."""
        self.wait_for_step(name, at_step)
        self._members.send_signal(name, signal.SIGKILL)
        return time.time(), self._step_of(name)

    def wait_for_step(self, names: str, step: int) -> None:
        where = f"on the way to step {step}"

        def is_there() -> bool:
            self._failed(where)
            return all(self._step_of(name) >= step for name in names)

        if not wait_until(is_there, _PATIENCE_S):
            found = ", ".join(f"{name}: step {self._step_of(name)}" for name in names)
            begun = [self._latest(name)[0] for name in names]
            hint = "false-alarm" if min(begun) >= _MOST_WORLDS else "too-late"
            raise Shortcoming(hint, f"step {step} within seconds", found, where=where)

    def _step_of(self, name: str) -> int:
        key = f"at/{name}"
        return int(self._store.get(key).decode().split()[1]) if self._store.check([key]) else 0

    def judge_begin(self, world: _World, reached: int, where: str) -> None:
        steps = {name: step for name, (step, _) in world.begins.items()}
        shown = ", ".join(f"{name}: step {step + 1}" for name, step in steps.items())
        if len(set(steps.values())) > 1:
            expected = "all members of a world begin with the same step"
            raise Shortcoming("not-restored", expected, shown, where=where)
        if min(steps.values()) < reached - _SAVE_EVERY - 1:
            expected = f"saved every {_SAVE_EVERY} steps; step {reached} was reached"
            raise Shortcoming(
                "lost-too-much", expected, f"the new world began with {shown}", where=where
            )

    def judge_end(self, names: str, right: tuple[list[float], list[float]]) -> None:
        losses, weights = right
        for name in names:
            try:
                its_losses, its_weights = self._members.result(name, 2 * _PATIENCE_S)
            except Shortcoming as found:
                hint = "too-late" if found.hint == "endless" else found.hint
                where = f"{name}, at step {self._step_of(name)}"
                raise Shortcoming(hint, found.expected, found.found, where=where) from found
            for step, loss in sorted(its_losses.items()):
                if loss != losses[step - 1]:
                    expected = f"step {step}: loss {losses[step - 1]:.9f}, as on one process"
                    raise Shortcoming("parted", expected, f"{loss:.9f}", where=name)
            if its_weights != weights:
                expected = "the weights of one undisturbed process"
                raise Shortcoming("parted", expected, "different weights", where=name)
