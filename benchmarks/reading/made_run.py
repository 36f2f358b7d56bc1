"""A made-up run of any size, in the files a real one leaves; to measure the readers with.

Steps of a quarter of a second with a few per cent of noise; one rank is slow for the second half;
the group fails once, a little before sixty per cent, and does its last steps again.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from drivetrain.record.run_directory import RunDirectory
from drivetrain.record.step_file import FIELDS, header

_BEGAN_S = 1_790_000_000.0
_SETUP_S, _NOTICE_S = 40.0, 12.0
_EXCHANGE_S = 0.012
_TAIL_S = 0.004
"""The optimizer's, and what is left of a step."""


@dataclass(frozen=True)
class MadeRun:
    """How large, and what goes wrong in it."""

    num_ranks: int
    num_steps: int
    logging_steps: int = 10
    save_steps: int = 500
    slow_rank: int | None = None
    slowness: float = 0.2
    has_failure: bool = True
    seed: int = 0

    @property
    def failed_step(self) -> int:
        """Where the first attempt ends; 0 without a failure."""
        return int(self.num_steps * 0.59) if self.has_failure else 0

    @property
    def resumed_step(self) -> int:
        """The last save before that."""
        return self.failed_step // self.save_steps * self.save_steps


def make_run(path: Path, made: MadeRun) -> None:
    """Write it."""
    run = RunDirectory.at(path)
    (path / "events").mkdir(exist_ok=True)
    run.write_run_yaml(_run_yaml(made))
    steps, attempts = _order(made)
    own_s, data_s = _work(made, len(steps), steps)
    slowest_s = own_s.max(axis=0)
    starts_s, ends_s = _clock(slowest_s + _EXCHANGE_S + _TAIL_S, attempts)
    records = np.zeros(len(steps), np.dtype(list(FIELDS)))
    records["step"], records["attempt"], records["start_s"] = steps, attempts, starts_s
    records["optimizer_s"], records["other_s"] = 0.003, 0.001
    for rank in range(made.num_ranks):
        records["data_wait_s"] = data_s[rank]
        records["compute_s"] = own_s[rank] - data_s[rank]
        records["communication_s"] = slowest_s - own_s[rank] + _EXCHANGE_S
        run.events(rank).with_suffix(".steps").write_bytes(header() + records.tobytes())
        text = _events(made, steps, attempts, ends_s) if rank == 0 else _brief(made, starts_s)
        run.events(rank).write_text(text)
    _write_attempts(run, made, starts_s, ends_s, attempts)


def _order(made: MadeRun) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The steps as they were taken, and in which attempt."""
    if not made.has_failure:
        steps = np.arange(1, made.num_steps + 1)
        return steps, np.ones_like(steps)
    first = np.arange(1, made.failed_step + 1)
    second = np.arange(made.resumed_step + 1, made.num_steps + 1)
    return np.concatenate([first, second]), np.repeat([1, 2], [len(first), len(second)])


def _work(
    made: MadeRun, num_records: int, steps: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """What each rank does by itself in each step, and how much of it is waiting for data."""
    random = np.random.default_rng(made.seed)
    shape = (made.num_ranks, num_records)
    own_s = random.standard_normal(shape, dtype=np.float32) * 0.004 + 0.21
    data_s = random.standard_exponential(shape, dtype=np.float32) * 0.003
    if made.slow_rank is not None:
        own_s[made.slow_rank, steps > made.num_steps // 2] *= 1 + made.slowness
    own_s += data_s
    return own_s, data_s


def _clock(
    lasted_s: NDArray[np.float32], attempts: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    ends_s = _BEGAN_S + _SETUP_S + np.cumsum(lasted_s.astype(np.float64))
    ends_s += np.where(attempts > 1, _NOTICE_S + _SETUP_S, 0.0)
    return ends_s - lasted_s, ends_s


def _loss(step: int, random: np.random.Generator) -> float:
    return 2.1 + 8.4 * math.exp(-((step / 900) ** 0.6)) + float(random.normal(0, 0.02))


def _rate(step: int, num_steps: int, warmup: int = 200) -> float:
    if step < warmup:
        return 3e-4 * step / warmup
    return 3e-5 + 1.35e-4 * (1 + math.cos(math.pi * (step - warmup) / max(1, num_steps - warmup)))


def _events(
    made: MadeRun,
    steps: NDArray[np.int64],
    attempts: NDArray[np.int64],
    ends_s: NDArray[np.float64],
) -> str:
    """Rank 0's: attempts, scalars and saves."""
    random = np.random.default_rng(made.seed + 1)
    lines, attempt, last_s = [], 0, _BEGAN_S
    for step, number, end_s in zip(steps.tolist(), attempts.tolist(), ends_s.tolist(), strict=True):
        if number != attempt:
            attempt, last_s = number, end_s - 0.24
            after = step - 1
            lines.append(_instant("attempt", last_s, number=number, resumed_step=after))
        if step % made.logging_steps == 0:
            rate = made.logging_steps * 2048 * made.num_ranks / max(end_s - last_s, 1e-3)
            last_s = end_s
            values = {
                "train/loss": _loss(step, random),
                "train/learning_rate": _rate(step, made.num_steps),
                "train/grad_norm": 0.4 + 2 / (1 + step / 300) + float(random.normal(0, 0.03)),
                "throughput/tokens_per_sec": rate,
            }
            document = {"kind": "scalars", "step": step, "time_s": end_s, "values": values}
            lines.append(json.dumps(document))
        if step % made.save_steps == 0:
            lines.append(_instant("saved", end_s + 9, step=step, blocked_s=0.35, beside_s=8.6))
    lines.append(_instant("run_end", float(ends_s[-1]) + 9.5, steps=made.num_steps))
    return "\n".join(lines) + "\n"


def _brief(made: MadeRun, starts_s: NDArray[np.float64]) -> str:
    """The other ranks': that they began."""
    said = [_instant("attempt", float(starts_s[0]), number=1, resumed_step=0)]
    if made.has_failure:
        again_s = float(starts_s[made.failed_step])
        said.append(_instant("attempt", again_s, number=2, resumed_step=made.resumed_step))
    return "\n".join(said) + "\n"


def _instant(name: str, time_s: float, **fields: object) -> str:
    return json.dumps({"kind": "instant", "name": name, "time_s": time_s, "fields": fields})


def _write_attempts(
    run: RunDirectory,
    made: MadeRun,
    starts_s: NDArray[np.float64],
    ends_s: NDArray[np.float64],
    attempts: NDArray[np.int64],
) -> None:
    for number in sorted(set(attempts.tolist())):
        inside = np.flatnonzero(attempts == number)
        is_last = number == attempts[-1]
        launched_s = float(starts_s[inside[0]]) - _SETUP_S
        facts = {
            "command_s": _BEGAN_S,
            "launched_s": launched_s,
            "started_s": float(starts_s[inside[0]]),
            "resumed_step": made.resumed_step if number > 1 else 0,
            "host": "node-0000",
            "environment": "slurm",
            "world_size": made.num_ranks,
            "layout": f"dp_replicate=8 dp_shard={max(1, made.num_ranks // 8)}",
            "device": "cuda",
            "drivetrain": "made up",
            "torch": "made up",
            "python": "made up",
        }
        run.begin_attempt(number, facts)
        killed = {"rank": 1, "pid": 4711, "exit_code": -9, "error": ""}
        run.end_attempt(
            number,
            {
                "kind": "finished" if is_last else "failed",
                "step": made.num_steps if is_last else made.failed_step,
                "host": "node-0000",
                "time_s": float(ends_s[inside[-1]]) + (10.0 if is_last else _NOTICE_S),
                "detail": "",
                "why": "",
                "failures": [] if is_last else [killed],
            },
        )


def _run_yaml(made: MadeRun) -> str:
    return (
        "config:\n"
        f"  global_batch_size: {made.num_ranks}\n  micro_batch_size: 1\n"
        f"  max_steps: {made.num_steps}\n  seed: 42\n"
        "  optimization:\n    learning_rate: 0.0003\n    lr_scheduler_type: cosine\n"
        "  parallel:\n    strategy: fsdp\n"
        "  checkpoint:\n    directory: null\n"
        "sources:\n"
        "  global_batch_size: 'file: made.yaml'\n  micro_batch_size: 'chosen: it fits'\n"
        "  max_steps: command line\n  seed: default\n"
        "  optimization.learning_rate: 'file: made.yaml'\n"
        "  optimization.lr_scheduler_type: 'file: made.yaml'\n"
        "  parallel.strategy: default\n  checkpoint.directory: default\n"
    )
