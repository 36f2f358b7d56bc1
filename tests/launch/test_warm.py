"""The warm process, which spares are forked from: what must keep it from being forked."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.supervise.processes.warm import READY, SOCKET
from drivetrain.supervise.processes.worker import PARENT

# As torch wants a device's module to be; one of CUDA's that has been initialised looks the same.
_DEVICE = """\
import os
import types
import torch

module = types.ModuleType("torch.tiny")
module.is_initialized = lambda: {is_initialized}
module._is_in_bad_fork = lambda: is_child
is_child = False

def after_fork():
    global is_child
    is_child = {spoils_children}

os.register_at_fork(after_in_child=after_fork)
torch.utils.rename_privateuse1_backend("tiny")
torch._register_device_module("tiny", module)
"""
_STATE = """\
import sys
from drivetrain.supervise.processes.node import WarmProcess
assert "torch" not in sys.modules  # or the warm process would be forked from this one
warm = WarmProcess(sys.argv[1:])
print(warm.state(wait=True))
warm.close()
"""


@pytest.mark.parametrize(
    ("is_initialized", "spoils_children", "state"),
    [
        pytest.param(False, False, "ready", marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param(True, False, "unfit", marks=[pytest.mark.slow, pytest.mark.long]),
        # torch.cuda.is_available() wakes the driver and leaves is_initialized() False
        (False, True, "unfit"),
    ],
)
def test_it_is_not_forked_once_an_import_has_touched_an_accelerator(
    tmp_path: Path, is_initialized: bool, spoils_children: bool, state: str
) -> None:
    library = tmp_path / "site-packages" / "tiny_device.py"  # only libraries are imported ahead
    library.parent.mkdir()
    library.write_text(
        _DEVICE.format(is_initialized=is_initialized, spoils_children=spoils_children)
    )
    script = tmp_path / "script.py"
    script.write_text("import tiny_device\n")
    path = os.pathsep.join([str(library.parent), *os.environ.get("PYTHONPATH", "").split(":")])
    done = subprocess.run(
        [sys.executable, "-c", _STATE, str(script)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == state


@pytest.mark.parametrize(
    "reads", [True, pytest.param(False, marks=[pytest.mark.slow, pytest.mark.long])]
)
def test_it_ends_in_silence_when_the_supervisor_leaves_early(reads: bool) -> None:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "drivetrain.supervise.processes.warm"],
        env={**os.environ, SOCKET: str(theirs.fileno()), PARENT: str(os.getpid())},
        pass_fds=[theirs.fileno()],
        stderr=subprocess.PIPE,
        text=True,
    )
    theirs.close()
    with ours:
        select.select([ours], [], [], 110)
        if reads:
            assert ours.recv(1) == READY
    assert process.communicate(timeout=30)[1] == ""  # with a word unread its end is reset
    assert process.returncode == 0
