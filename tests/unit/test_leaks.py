"""The fixture that holds every test to it, held to it itself: each leak must make a test fail."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from drivetrain.testing.pytest_plugin import child_pids, leaked_processes

pytest_plugins = ["pytester"]

LEAKS = {
    "environment variable LEAKED": "import os; os.environ['LEAKED'] = '1'",
    "thread sleeper": """
        import threading, time
        threading.Thread(target=time.sleep, args=(6,), name='sleeper', daemon=True).start()
    """,
    "process ": "import subprocess; subprocess.Popen(['sleep', '6'])",
    "the default process group": """
        import torch.distributed as dist
        dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    """,
}


NO_LEAKS = {
    "nothing": "pass",
    "a process that has ended, whose exit code nobody asks for": """
        import subprocess
        global kept
        kept = subprocess.Popen(['true'])
    """,
}


def test_a_leak_fails_its_test_and_no_other(pytester: pytest.Pytester) -> None:
    bodies = [*NO_LEAKS.values(), *LEAKS.values()]
    pytester.makepyfile("import pytest\n" + "\n".join(map(_test_of, range(6), bodies)))
    result = pytester.runpytest_subprocess("-W", "ignore", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=len(bodies), errors=len(LEAKS))
    result.stdout.fnmatch_lines([f"*left behind: {what}*" for what in LEAKS])


def _test_of(number: int, body: str) -> str:
    code = textwrap.indent(textwrap.dedent(body), "    ")
    return f"@pytest.mark.usefixtures('no_leaks')\ndef test_{number}():\n{code}\n"


def test_pythons_own_helper_is_none_however_long_its_command_line(tmp_path: Path) -> None:
    python = tmp_path / ("long" * 25) / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    argv = [str(python), "-c", "import time; time.sleep(30)  # multiprocessing.resource_tracker"]
    before = child_pids()
    helper = subprocess.Popen(argv)
    try:
        assert leaked_processes(before) == []
    finally:
        helper.kill()
        helper.wait()
