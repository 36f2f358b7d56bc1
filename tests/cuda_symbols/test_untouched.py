"""What must not wake CUDA: contexts cost memory on the first device, and forbid forking."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

_MARK = "-- from here on --"
# Two libraries look for the driver's when they are loaded, with torch. The runtime does so when it
# is first used, which the loader tells of (ld.so(8)); whether there is a driver does not matter.
_AWAKE = "libcuda.so.1 [0];  dynamically loaded by"


def _wakes_cuda(words: str, before: str = "import torch") -> bool:
    """Whether a process that runs `words` uses CUDA's runtime."""
    program = f"import os\n{before}\nos.write(2, b'\\n{_MARK}\\n')\n{words}\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "LD_DEBUG": "files"},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
        check=True,
    )
    lines = done.stderr.split(_MARK)[1].splitlines()
    return any(_AWAKE in line and "libcudart" in line for line in lines)


_MODEL = "model = torch.nn.Linear(2, 2)\nloss = model(torch.ones(1, 2)).sum()"
_OPTIMIZER = "optimizer = torch.optim.AdamW(model.parameters())"


@pytest.mark.parametrize(
    "words",
    [
        f"{_MODEL}\nloss.backward()",
        f"{_MODEL}\n{_OPTIMIZER}\noptimizer.step()",
        "torch.cuda.is_available()",
    ],
)
def test_what_does_wake_it_is_seen(words: str) -> None:
    assert _wakes_cuda(words)


def test_a_warm_spare_does_not() -> None:
    ahead = "from drivetrain.supervise.processes import worker\n"
    assert not _wakes_cuda(
        f"{ahead}worker.import_ahead([])\nworker._load_lazy_parts()", before="import torch"
    )


def test_importing_drivetrain_does_not() -> None:
    names = "import drivetrain\n[getattr(drivetrain, name) for name in drivetrain.__all__]"
    assert not _wakes_cuda(names)


@pytest.mark.skipif(
    find_spec("drivetrain.parallel.accelerator") is None, reason="there is no such module yet"
)
def test_importing_the_accelerator_does_not() -> None:
    assert not _wakes_cuda("import drivetrain.parallel.accelerator")


_FORK = """\
import torch
from drivetrain.supervise.processes.forking import is_fork_safe
before = is_fork_safe()
torch.cuda.is_available()
print(before, is_fork_safe(), torch.cuda.is_initialized())
"""


def test_a_process_that_has_counted_devices_is_not_forked() -> None:
    words = [sys.executable, "-c", _FORK]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["True", "False", "False"]
