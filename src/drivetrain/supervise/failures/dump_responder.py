"""What a rank can tell about itself when its supervisor asks, even while its main thread is stuck.

Stacks come from faulthandler, on a signal: that needs nothing of Python. The collectives it has
called (flight_recorders.py) are told by a thread that sleeps on a named pipe: a rank that
waits in a collective does not hold Python's lock. Nothing but the standard library is loaded here.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import threading
from pathlib import Path

from drivetrain.core.files import write_whole
from drivetrain.supervise.failures.flight_recorders import latest_collectives

STACKS = "DRIVETRAIN_STACKS"
ASK = "DRIVETRAIN_ASK"
COLLECTIVES = "DRIVETRAIN_COLLECTIVES"
STACKS_SIGNAL = signal.SIGUSR2
_places: dict[str, Path] = {}
"""Where this process leaves its collectives; empty when nobody asks for them."""


def stay_ready() -> None:
    """From now on this process answers."""
    stacks, ask = os.environ.pop(STACKS, None), os.environ.pop(ASK, None)
    collectives = os.environ.pop(COLLECTIVES, None)
    if stacks is not None:
        # data workers that are forked write to it too: each line goes to the end
        file = open(stacks, "a")  # noqa: SIM115 - stays open as long as the process
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
        if not faulthandler.is_enabled():  # the last word of one that a library aborts
            faulthandler.enable(file=file, all_threads=True)
    if ask is not None and collectives is not None:
        _places[COLLECTIVES] = Path(collectives)
        threading.Thread(target=_listen, args=(ask,), name="answer", daemon=True).start()


def tell_collectives() -> None:
    """Leave them where the supervisor looks; never a reason to fail."""
    place = _places.get(COLLECTIVES)
    if place is not None:
        with contextlib.suppress(Exception):
            told = latest_collectives()
            if told is not None or not place.exists():  # a failed rank has told, and left its group
                write_whole(place, json.dumps(told))


def _listen(path: str) -> None:
    while True:
        try:
            with open(path, "rb", buffering=0) as pipe:  # waits here until somebody asks
                asked = pipe.read(1)
        except OSError:
            return  # the session is gone
        if asked:
            tell_collectives()
