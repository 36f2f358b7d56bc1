"""The fixture that holds every test to it, held to it itself: each leak must make a test fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.testing.pytest_plugin import child_pids

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


@pytest.mark.parametrize("what", LEAKS)
def test_a_leak_fails_the_test(pytester: pytest.Pytester, what: str) -> None:
    import textwrap

    body = textwrap.indent(textwrap.dedent(LEAKS[what]), "    ")
    pytester.makepyfile(
        f"import pytest\n\n@pytest.mark.usefixtures('no_leaks')\ndef test_it():\n{body}\n"
    )
    result = pytester.runpytest_subprocess("-W", "ignore", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines([f"*left behind: {what}*"])


def test_a_clean_test_passes(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import pytest\n\n@pytest.mark.usefixtures('no_leaks')\ndef test_it():\n    pass\n"
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_a_process_that_has_ended_is_none(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import pytest, subprocess\n\n@pytest.mark.usefixtures('no_leaks')\ndef test_it():\n"
        "    global kept\n    kept = subprocess.Popen(['true'])  # nobody asks for its exit code\n"
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


def test_pythons_own_helper_is_none_however_long_its_command_line(tmp_path: Path) -> None:
    python = tmp_path / ("long" * 25) / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    argv = [str(python), "-c", "import time; time.sleep(30)  # multiprocessing.resource_tracker"]
    helper = subprocess.Popen(argv)
    try:
        assert helper.pid not in child_pids()
    finally:
        helper.kill()
        helper.wait()
