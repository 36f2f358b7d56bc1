"""Live: a replica is killed and comes back, the run goes on, and no number changes.

A real lighthouse, real processes, a real SIGKILL in the middle of a step.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drivetrain.data.batches import BatchPlan
from drivetrain.data.elastic_feed import ElasticFeed, own_turns
from drivetrain.data.rank_sample_ids import RankSampleIds
from drivetrain.data.sources import Source
from tests.ranks.training import NUM_SAMPLES, assert_same_training, train_gpt

needs_torchft = pytest.mark.skipif(
    importlib.util.find_spec("torchft") is None,
    reason="torchft is not installed: pip install 'drivetrain[live]'",
)
STEPS, JOIN_AT, KILL_AT, REJOIN_AT = 50, 3, 12, 30
PLAN = BatchPlan(24, 3, 1, NUM_SAMPLES)


@pytest.fixture
def lighthouse() -> Iterator[str]:
    """The address of a lighthouse of the test's own."""
    command = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--bind=[::]:0"]
    command += ["--min_replicas=1", "--heartbeat_timeout_ms=1000", "--quorum_tick_ms=20"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=quiet("info")
    )
    assert process.stdout is not None
    lines = itertools.islice(process.stdout, 20)  # its address is in one of the first
    found = next(filter(None, (re.search(r"http://\S+", line) for line in lines)), None)
    # read on, or it would stop when the pipe is full
    reader = threading.Thread(target=process.stdout.read)
    reader.start()
    try:
        assert found is not None
        yield found[0]
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()


def quiet(level: str = "warn", **variables: str) -> dict[str, str]:
    return {**os.environ, "RUST_LOG": level, "OMP_NUM_THREADS": "1", **variables}


class Replicas:
    """The worker processes of one test."""

    def __init__(self, folder: Path, lighthouse: str) -> None:
        self.folder, self.lighthouse = folder, lighthouse
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, pause_s: float, *holds: int) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.ranks.live_worker"),
                    *(str(self.folder), name, str(STEPS), str(pause_s), *map(str, holds)),
                ],
                cwd=Path(__file__).parents[2],
                env=quiet(TORCHFT_LIGHTHOUSE=self.lighthouse),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, file: str, patience_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + patience_s
        while not (self.folder / file).exists():
            assert time.monotonic() < deadline_s, f"no {file} after {patience_s:g} s"
            time.sleep(0.01)

    def go(self, step: int) -> None:
        (self.folder / f"go.{step}").touch()

    def kill(self, name: str) -> float:
        self.processes[name].kill()
        self.processes[name].wait()
        return time.time()

    def finish(self, name: str) -> None:
        code = self.processes[name].wait(90)
        assert code == 0, (self.folder / f"{name}.log").read_text()[-3000:]

    def lines(self, name: str) -> list[dict[str, Any]]:
        text = (self.folder / f"{name}.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def replicas(tmp_path: Path, lighthouse: str) -> Iterator[Replicas]:
    started = Replicas(tmp_path, lighthouse)
    yield started
    started.end()


@needs_torchft
@pytest.mark.slow
@pytest.mark.parametrize(  # the first seat, whose store the others meet at; the last
    "victim", ["a", pytest.param("b", marks=pytest.mark.long)]
)
def test_a_killed_replica_comes_back_and_no_number_changes(
    victim: str, replicas: Replicas, tmp_path: Path, record_property: Any
) -> None:
    survivor, again = ("b" if victim == "a" else "a"), f"{victim}2"
    replicas.start(survivor, 0.05, JOIN_AT, REJOIN_AT)
    replicas.wait_for(f"{survivor}.at.{JOIN_AT}")
    replicas.start(victim, 0.05, KILL_AT)
    join(replicas, victim, JOIN_AT)
    replicas.wait_for(f"{victim}.at.{KILL_AT}")
    time.sleep(0.3)  # the survivor has done its share and waits for the other's gradients
    killed_s = replicas.kill(victim)
    replicas.wait_for(f"{survivor}.at.{REJOIN_AT}")
    replicas.start(again, 0.05)
    join(replicas, again, REJOIN_AT)
    replicas.finish(survivor)
    replicas.finish(again)

    *steps, last = replicas.lines(survivor)
    *late_steps, late = replicas.lines(again)
    lost_steps = replicas.lines(victim)
    pause_s = next(each["at_s"] for each in steps if each["step"] == KILL_AT) - killed_s
    record_property("pause_s", pause_s)
    print(f"the survivor of {victim} went on after {pause_s:.2f} s")
    assert pause_s < 10

    assert lost_steps
    assert lost_steps[-1]["step"] == KILL_AT - 1
    assert late_steps[0]["step"] > REJOIN_AT
    assert [each["step"] for each in steps] == list(range(STEPS))
    assert trained(steps, lost_steps, late_steps) == expected()

    reference, _, _ = train_gpt(str(tmp_path / "reference"), checkpoint={"every_steps": None})
    for end in (last, late):  # who came late was told of what it missed
        assert end["numbers"] == list(range(1, STEPS + 1))
        assert_same_training(end["losses"], reference)
    assert late["weights"] == last["weights"]


def join(replicas: Replicas, name: str, hold: int) -> None:
    """`name` has asked for a quorum before the others leave their step `hold`."""
    replicas.wait_for(f"{name}.ready")
    time.sleep(1.0)
    replicas.go(hold)


def trained(*by_replica: list[dict[str, Any]]) -> list[list[int]]:
    """Each committed step's samples, over all replicas."""
    steps: list[list[int]] = [[] for _ in range(STEPS)]
    for lines in by_replica:
        for line in lines:
            steps[line["step"]] += line["ids"]
    return [sorted(ids) for ids in steps]


def expected() -> list[list[int]]:
    ids = RankSampleIds(PLAN, 0, 42, shuffle=True)
    return [
        sorted(i for micro in own_turns(PLAN, step, 0) for i in ids.ids(micro))
        for step in range(STEPS)
    ]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_whatever_the_seats_each_step_has_its_samples(num_workers: int) -> None:
    source = Source(list(range(NUM_SAMPLES)), NUM_SAMPLES, shuffle=True, num_workers=num_workers)
    feeds = [ElasticFeed(source, PLAN, 42) for _ in range(3)]
    for feed in feeds:
        next(feed.steps(11, None))
    wanted = expected()
    for step, seats in [(0, 1), (1, 2), (2, 2), (2, 1), (2, 3), (3, 3), (9, 3), (10, 1)]:
        dealt = [
            number
            for seat in range(seats)
            for _, batch in feeds[seat].deal(step, seats, seat)
            for number in batch.tolist()
        ]
        assert sorted(dealt) == wanted[step]


def test_a_seat_without_samples_has_no_turns() -> None:
    plan = BatchPlan(6, 3, 3, 12)
    assert [len(own_turns(plan, 0, seat)) for seat in range(3)] == [1, 1, 0]
