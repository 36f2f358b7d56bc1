"""Populations whose trials are trained in one process: fifty forks, and forks that are killed.

    python -m tests.tune.forks benchmarks/results/tune      # the table; `make tune` checks the same

Decisions, checkpoints, pins and retention are the real ones; only launching is left out.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset

from drivetrain import Task, Trainer
from drivetrain.checkpoint import pins as pin_files
from drivetrain.checkpoint.storage import storage_at
from drivetrain.launch.target import State as JobState
from drivetrain.launch.target import Status
from drivetrain.launch.targets.local import Local
from drivetrain.record import session
from drivetrain.testing import run_ranks
from drivetrain.tune import driver, fork, population
from drivetrain.tune.decide import Work
from drivetrain.tune.journal import Asked, Ended, State, read_journal
from drivetrain.tune.settings import Settings, Study, open_study
from drivetrain.tune.space import Float, Space
from drivetrain.tune.trial_run import Runner, local_job

SPACE = Space(
    {
        "optimization.learning_rate": Float(1e-3, 1e-1, log=True),
        "optimization.weight_decay": Float(0.0, 0.1),
        "optimization.max_grad_norm": Float(0.1, 10.0, log=True),
    }
)
_DURABLE = ("fsync", "link", "replace", "rename", "unlink")
"""What of `os` changes what is found after a kill."""


def make_study(path: Path, size: int, rungs: tuple[int, ...], quantile: float) -> Study:
    settings = Settings(
        "in process",
        (),
        num_trials=size,
        generation=size,
        population=size,
        quantile=quantile,
        rungs=rungs,
        sampler="random",
    )
    return open_study(path, settings, SPACE)


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _model() -> nn.Module:
    """With dropout: its random stream is the donor's, too, or losses differ."""
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))


@dataclass
class Beginning:
    """What the first optimizer step of a run has before it."""

    facts: dict[str, str] = field(default_factory=dict)

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.facts:
            return
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        self.facts = {
            "weights": _sha256(weights),
            "gradients' signs": _sha256([p.grad.sign() for p in weights if p.grad is not None]),
            "optimizer": _sha256([t for p in weights for t in optimizer.state[p].values()]),
            "random state": _sha256([torch.get_rng_state()]),
            "settings": json.dumps(
                [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
            ),
        }


def _sha256(tensors: list[Any]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(torch.as_tensor(tensor).detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def train(run_dir: Path, words: tuple[str, ...], flags: tuple[str, ...], steps: int) -> Beginning:
    """A trial's run, up to where its words have it stop."""
    accepted = [each.partition("=")[2] for each in flags if each.startswith("--accept-change")]
    os.environ[session.RUN_DIR] = str(run_dir)
    os.environ[session.ACCEPT_CHANGE] = ",".join(accepted)
    session._opened = 0
    config: dict[str, Any] = {
        "global_batch_size": 8,
        "max_steps": steps,
        "evaluation": {"every_steps": 2},
        "checkpoint": {"every_steps": 1, "keep_last": 1, "asynchronous": False},
        "optimization": {"lr_scheduler_type": "cosine"},
        "record": {"progress": "none", "sinks": [], "system_every_s": None},
    }
    for word in words:
        key, _, value = word.partition("=")
        *sections, last = key.split(".")
        place = config
        for section in sections:
            place = place.setdefault(section, {})
        number = yaml.safe_load(value)
        place[last] = float(value) if "e-" in value and isinstance(number, str) else number
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    seen = Beginning()
    handle = register_optimizer_step_pre_hook(seen)
    try:
        task = Task(_model, _loss, metrics=lambda model, batch: {"loss": _loss(model, batch)})
        Trainer(task, config).fit(data, data)
    finally:
        handle.remove()
    return seen


class InProcess(Runner):
    """Trains where a target would be asked to; a file says how far it came."""

    def status(self, asked: Asked, rung: int) -> Status | None:
        file = self.study.run_dir(asked.trial) / "in-process.json"
        if not file.exists():
            return None
        said = json.loads(file.read_text())
        if said["words"] != list(self.job(asked, rung).script_args):
            return None
        state = JobState.FINISHED if said["is_done"] else JobState.STOPPED
        return Status(state, exit_code=0)

    def start(self, asked: Asked, rung: int, running: Iterable[int]) -> bool:
        job = self.job(asked, rung)
        run_dir = Path(job.run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        file = run_dir / "in-process.json"
        for is_done in (False, True):
            file.with_suffix(".new").write_text(
                json.dumps({"words": job.script_args, "is_done": is_done})
            )
            file.with_suffix(".new").rename(file)
            if not is_done:
                train(run_dir, job.script_args, job.flags, self.study.settings.rungs[-1] + 2)
        return True


def drive(path: Path, kill_at: int, log: Path | None) -> None:
    """One driver, killed at the n-th durable action after it has begun with a fork; 0: never."""
    study = make_study(path, 4, (2, 4, 6), 0.5)
    if kill_at:
        _arm(kill_at, log)
    setattr(driver, "SETTLE_S", 0.0)  # noqa: B010 - imported there, and not for others
    driver.Driver(study, InProcess(study, Local(), local_job(study)), 1).run()


def _arm(kill_at: int, log: Path | None) -> None:
    left, is_armed = kill_at, False

    def counted(name: str, action: Any) -> Any:
        def act(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= is_armed
            if left == 0:
                if log is not None:
                    frames = [f for f in traceback.extract_stack() if "drivetrain" in f.filename]
                    where = [f"{Path(f.filename).stem}.{f.name}" for f in frames[-4:]]
                    with log.open("a") as file:
                        file.write(f"{name} in {' > '.join(where)}\n")
                os.kill(os.getpid(), signal.SIGKILL)
            return action(*args, **kwargs)

        return act

    def arming(action: Any) -> Any:
        def act(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_armed
            is_armed = True
            return action(*args, **kwargs)

        return act

    for name in _DURABLE:
        setattr(os, name, counted(name, getattr(os, name)))
    if kill_at % 4:  # else only where a fork has saved, and its donor's checkpoint may go
        fork.begun = arming(fork.begun)
        pin_files.pin = arming(pin_files.pin)
    else:
        left = kill_at // 4
    pin_files.release = arming(pin_files.release)


def facts(path: Path) -> Any:
    """All that a study decided; attempts, and so checkpoints' names, are others after kills."""
    state = read_journal(path)
    asked = [
        (each.trial, dict(each.values), each.fork and (each.fork.donor, each.fork.step))
        for each in state.asked
    ]
    ends = sorted((e.trial, e.rung, e.outcome, e.step, e.value) for e in state.ended.values())
    return asked, ends


def open_pins(path: Path) -> list[str]:
    return [file.name for file in path.glob("trials/*/checkpoints/pin-*")]


def killed_forks(folder: Path, num_kills: int) -> dict[str, Any]:
    """A study whose driver, and what it trains, is killed again and again; and one that is not."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.tune.forks"])
    log, ends = folder / "kills.txt", []

    def once(name: str, kill_at: int) -> int | None:
        process = context.Process(target=drive, args=(folder / name, kill_at, log))
        process.start()
        process.join(300)
        ends.append(process.exitcode)
        return process.exitcode

    kill_at = 0
    while ends.count(-signal.SIGKILL) < num_kills and 0 not in ends:
        kill_at += 1
        once("rough", kill_at)
    while once("rough", 0) != 0:
        assert ends[-1] is not None, "it hangs"
        assert len(ends) < 2 * num_kills, ends
    once("calm", 0)
    return {
        "kills": ends.count(-signal.SIGKILL),
        "where": log.read_text().splitlines(),
        "same trials, forks and values": facts(folder / "calm") == facts(folder / "rough"),
        "pins left": open_pins(folder / "rough"),
        "forks": sum(1 for each in facts(folder / "calm")[0] if each[2]),
    }


def many_forks(folder: str, num_rungs: int) -> list[dict[str, Any]]:
    """On every rank: a population of four, two forks at each rung; each fork beside its donor."""
    rungs = tuple(range(2, 2 * num_rungs + 1, 2))
    study = make_study(Path(folder) / f"rank-{dist.get_rank()}", 4, rungs, 0.5)
    # both ranks decide by themselves, of runs that they train together
    shared = Study(Path(folder) / "shared", study.settings, study.space)
    runner, state, kept = Runner(shared, Local(), local_job(shared)), State(), fork.Pins(shared)
    for member, rate in enumerate((0.003, 0.01, 0.03, 0.09)):
        values = {"learning_rate": rate, "weight_decay": 0.01, "max_grad_norm": 1.0}
        state.take(Asked(member, {f"optimization.{k}": v for k, v in values.items()}))
    beginnings: dict[tuple[int, int], Mapping[str, str]] = {}
    while works := population.ready(study.settings, state):
        for trial, rung in works:
            job = runner.job(state.asked[trial], rung)
            seen = train(Path(job.run_dir), job.script_args, job.flags, rungs[-1] + 2)
            beginnings[trial, rung] = seen.facts
            state.take(_ended(shared, trial, rung))
        while (due := population.next_fork(study, state)) is not None:
            state.take(fork.begun(shared, due))
        if dist.get_rank() == 0:
            kept.keep(state)
        dist.barrier()
    return [_compared(shared, state, beginnings, each) for each in state.asked if each.fork]


def _ended(study: Study, trial: int, rung: int) -> Ended:
    work = Work(trial, rung)
    dist.barrier()
    found = Runner(study, Local(), local_job(study)).result(
        work, Status(JobState.FINISHED, exit_code=0), 0
    )
    assert found is not None
    assert found.outcome == "done", found
    return found


def _compared(
    study: Study,
    state: State,
    beginnings: Mapping[tuple[int, int], Mapping[str, str]],
    asked: Asked,
) -> dict[str, Any]:
    """The first step after the fork: the donor's, which went on, and the fork's."""
    assert asked.fork is not None
    rung = asked.fork.rung + 1
    theirs, ours = beginnings[asked.fork.donor, rung], beginnings[asked.trial, rung]
    same = [key for key in theirs if theirs[key] == ours[key]]
    changed = [k for k, v in asked.values.items() if v != state.asked[asked.fork.donor].values[k]]
    storage = storage_at(study.run_dir(asked.fork.donor) / "checkpoints")
    return {
        "fork": asked.trial,
        "donor": asked.fork.donor,
        "step": asked.fork.step,
        "changed": changed,
        "same": same,
        "weights": ours["weights"],
        "pins left": sorted(pin_files.pinned(storage)),
    }


def table(folder: Path) -> dict[str, Any]:
    """Fifty forks on two ranks, and twenty kills."""
    with tempfile.TemporaryDirectory(prefix="forks-") as scratch:
        ranks = run_ranks(many_forks, 2, 3000, args=(scratch, 25))
        kills = Path(scratch) / "kills"
        kills.mkdir()
        killed = killed_forks(kills, 20)
    wanted = ["weights", "gradients' signs", "optimizer", "random state"]
    equal = [all(key in each["same"] for key in wanted) for forks in ranks for each in forks]
    found = {
        "torch": str(torch.__version__),
        "forks": len(ranks[0]),
        "ranks": 2,
        "bit-equal to the donor on every rank": sum(equal) // 2,
        "pins left": sum(len(each["pins left"]) for each in ranks[0]),
        "forks whose settings changed": sum(bool(each["changed"]) for each in ranks[0]),
        "killed": killed,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "forks.json").write_text(json.dumps({**found, "each": ranks[0]}, indent=1) + "\n")
    return found


if __name__ == "__main__":
    print(json.dumps(table(Path(sys.argv[1])), indent=1))
