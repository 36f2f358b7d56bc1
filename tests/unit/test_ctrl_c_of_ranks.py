"""Ctrl-C while the process that forks the ranks is being started is not lost."""

from __future__ import annotations

import os
import signal
from multiprocessing import forkserver

import pytest

from drivetrain.testing import ranks


def test_it_comes_when_that_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    def interrupted() -> None:
        begun.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(forkserver, "ensure_running", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background: ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            ranks._start_importing()
    finally:
        signal.signal(signal.SIGINT, before)
    assert begun == [True], "what is started then does not hear it"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
