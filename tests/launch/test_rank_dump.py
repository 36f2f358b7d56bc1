"""A rank that is asked what it does answers, whatever its threads are doing, and lives on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from drivetrain.diagnose.stacks import parse_stacks
from drivetrain.supervise.failures.rank_dump import DumpFiles, collect_dumps

RANK = """
from drivetrain.supervise.failures.dump_responder import stay_ready
stay_ready()
"""
BUSY_THREADS = """
import threading, time
def dig(depth):
    return depth and dig(depth - 1)
def dig_on():
    while True:
        dig(200)
for _ in range(3):
    threading.Thread(target=dig_on, daemon=True).start()
def wait_for_a_rank():
    print("ready", flush=True)
    time.sleep(600)
wait_for_a_rank()
"""
HOLDS_THE_LOCK = """
import ctypes
sleep = ctypes.PyDLL(None).sleep
def stuck_in_c():
    print("ready", flush=True)
    sleep(600)  # unlike CDLL it keeps Python's lock
stuck_in_c()
"""


@dataclass
class Rank:
    process: subprocess.Popen[str]
    local_rank: int = 0

    @property
    def pid(self) -> int:
        return self.process.pid


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Rank]]:
    started = []

    def start(script: str) -> Rank:
        command = [sys.executable, "-c", RANK + script]
        variables = {**os.environ, **DumpFiles(tmp_path, 0).prepare()}
        process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return Rank(process)

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_threads_that_run_python_meanwhile_do_not_crash_it(
    start: Callable[[str], Rank], tmp_path: Path
) -> None:
    rank = start(BUSY_THREADS)
    for _ in range(10):
        stacks = parse_stacks(collect_dumps(tmp_path, [rank])[0].stacks)
        assert rank.process.poll() is None
        assert stacks is not None
        assert stacks.main is not None
        assert stacks.main.frames[0].function == "wait_for_a_rank"
        assert len(stacks.threads) == 1 + 3  # the one that answers is not told


def test_one_that_holds_pythons_lock_is_asked_by_a_signal(
    start: Callable[[str], Rank], tmp_path: Path
) -> None:
    rank = start(HOLDS_THE_LOCK)
    stacks = parse_stacks(collect_dumps(tmp_path, [rank])[0].stacks)
    assert stacks is not None
    assert stacks.main is not None
    assert stacks.main.frames[0].function == "stuck_in_c"


def test_one_that_has_not_begun_is_not_ended_by_the_question(tmp_path: Path) -> None:
    DumpFiles(tmp_path, 0).prepare()
    rank = Rank(subprocess.Popen(["sleep", "600"], text=True))
    try:
        assert collect_dumps(tmp_path, [rank])[0].stacks == ""
        assert rank.process.poll() is None
    finally:
        rank.process.kill()
        rank.process.wait()
