"""Real signals to this process: noted, woken up by, interrupted by."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from drivetrain.supervise.processes.head_start import ASKS, HeadStart
from drivetrain.supervise.requests import Interrupted, Requests


@pytest.fixture
def requests() -> Iterator[Requests]:
    before = signal.getsignal(signal.SIGTERM)
    listening = Requests()
    with listening.listening(None):
        yield listening
    assert signal.getsignal(signal.SIGTERM) is before


def ask_after(seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    return timer


def test_a_request_is_taken_once(requests: Requests) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    assert requests.take() == "SIGUSR1"
    assert requests.take() == ""


def test_waiting_ends_with_a_request(requests: Requests) -> None:
    timer, started_s = ask_after(0.2), time.monotonic()
    requests.wait([], 30)
    assert time.monotonic() - started_s < 20
    assert requests.pending == "SIGTERM"
    timer.join()


def test_waiting_ends_with_a_process_and_does_not_mind_one_that_is_gone(requests: Requests) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    living = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.2)"])
    started_s = time.monotonic()
    requests.wait([gone.pid, living.pid], 60)
    assert time.monotonic() - started_s < 40
    assert living.wait() == 0
    assert not requests.pending


def test_what_would_go_on_waiting_is_interrupted_and_the_request_is_still_there(
    requests: Requests,
) -> None:
    timer = ask_after(0.2)
    with pytest.raises(Interrupted):
        requests.interrupting(lambda: time.sleep(30))
    timer.join()
    assert requests.take() == "SIGTERM"
    os.kill(os.getpid(), signal.SIGTERM)  # from here on it is only noted
    assert requests.take() == "SIGTERM"


def test_what_came_during_a_head_start_counts_too() -> None:
    head_start = HeadStart.__new__(HeadStart)  # of no ranks
    head_start.asked = "SIGINT"
    requests = Requests()
    with requests.listening(head_start):
        assert requests.take() == "SIGINT"
    requests.pending = "SIGTERM"
    with requests.listening(head_start):
        assert requests.take() == "SIGTERM", "what came last"


def test_afterwards_signals_are_whose_they_were_and_nothing_is_left_open() -> None:
    before = [signal.getsignal(number) for number in ASKS]
    num_open = len(os.listdir("/proc/self/fd"))
    requests = Requests()
    with requests.listening(None):
        assert [signal.getsignal(number) for number in ASKS] == [requests._note] * 3
        for number in ASKS:
            os.kill(os.getpid(), number)
            assert requests.take() == number.name
        living = subprocess.Popen(["sleep", "30"])
        started_s = time.monotonic()
        requests.wait([living.pid], 0.05)  # the signals were told once already
        requests.wait([living.pid], 0.3)
        assert time.monotonic() - started_s >= 0.3, "each wakes up once"
        living.kill()
        living.wait()
    assert [signal.getsignal(number) for number in ASKS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert len(os.listdir("/proc/self/fd")) == num_open
