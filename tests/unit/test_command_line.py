"""Whose words `load_config()` reads: the script's, and nobody else's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.config import ResolvedConfig, load_config
from drivetrain.config.script_parser import is_parserless, settings_problem
from drivetrain.core.errors import ConfigError, EnvironmentProblem
from drivetrain.testing import run_ranks

DEFAULTS = {"global_batch_size": 16, "max_steps": 5}


def typed(monkeypatch: pytest.MonkeyPatch, *words: str) -> ResolvedConfig:
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    # a worker of pytest-xdist has none
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "train.py", raising=False)
    return load_config(defaults=DEFAULTS)


def refused(monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        typed(monkeypatch, *words)
    return str(caught.value)


def test_pytests_own_words_are_not_read() -> None:
    # this test's own program; -c is a worker of pytest-xdist
    assert Path(sys.argv[0]).name in ("pytest", "__main__.py", "-c")
    assert load_config(defaults=DEFAULTS).config.max_steps == 5


@pytest.mark.parametrize(
    "argv",
    [
        ["/bin/pytest", "-x", "tests/test_train.py"],
        ["/lib/pytest/__main__.py", "tests", "max_steps=7"],
        ["python -m unittest", "test_train"],
        ["/lib/ipykernel_launcher.py", "-f", "kernel-1.json"],
        ["/lib/colab_kernel_launcher.py", "-f", "kernel-1.json"],
    ],
)
def test_a_program_that_runs_others_code_keeps_its_words(
    argv: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert load_config(defaults=DEFAULTS).config.max_steps == 5


def test_a_kernel_that_nobody_has_heard_of_has_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/opt/kernel", "notebook.json"])
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    assert load_config(defaults=DEFAULTS).config.max_steps == 5


def test_code_on_the_command_line_reads_the_words_after_it() -> None:
    code = (
        "from drivetrain import load_config\n"
        f"print(load_config(defaults={DEFAULTS}).config.max_steps)"
    )
    command = [sys.executable, "-c", code, "max_steps=9"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "9\n"


def test_flags_of_the_scripts_own_are_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--width", "32", "max_steps=7", "-v", "--layers", "2", "3", "--token=secret", "seed=1")
    resolved = typed(monkeypatch, *words)
    assert (resolved.config.max_steps, resolved.config.seed) == (7, 1)
    assert resolved.left_to_script == ("--width", "-v", "--layers", "--token")  # values unsaid


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--width", "3", "max_stpes=7"], "max_stpes = 7: unknown key; did you mean max_steps?"),
        (["fast"], "fast: not an override; write path.to.key=value"),
        (["seed=1", "fast"], "fast: not an override; write path.to.key=value"),
        (
            ["fast.yaml"],
            "fast.yaml: a config file is given with its flag; write --config fast.yaml",
        ),
        (
            ["seed=1", "--nproc-per-node", "2"],
            "--nproc-per-node: is a flag of the launcher, not of the script; write it before the "
            "script: `drivetrain train --nproc-per-node …`",
        ),
        (
            ["run_dir=runs/a"],
            "run_dir = runs/a: is not a key but a flag of the launcher; write drivetrain train "
            "SCRIPT --run-dir runs/a",
        ),
        (["--help"], "--help: the script does not parse it; `drivetrain config` lists all keys"),
        (
            ["--learning-rate=3"],
            "--learning-rate=3: is a config key, which takes no leading dashes; write "
            "optimization.learning_rate=value; if the flag is the script's own: args, rest = "
            "parser.parse_known_args() and load_config(argv=rest)",
        ),
    ],
)
def test_what_would_be_ignored_in_silence_is_refused(
    words: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused(monkeypatch, *words) == expected


TRAINS = "from drivetrain import load_config\nload_config()\n"


@pytest.mark.parametrize(
    ("script", "beside", "is_certain"),
    [
        (f"import torch, math\n{TRAINS}", "", True),
        (f"import beside\nmodel.eval()\n{TRAINS}", "import numpy\n", True),
        (f"import beside\n{TRAINS}", "from sys import argv\n", False),
        (f"import argparse\n{TRAINS}", "", False),
        (f"import a_library_of_theirs\n{TRAINS}", "", False),
        (f"from .settings import flags\n{TRAINS}", "", False),
        (f"from . import beside\n{TRAINS}", "import numpy\n", True),
        (f"from . import beside\n{TRAINS}", "import argparse\n", False),
        (f"from tools import quiet\n{TRAINS}", "", True),
        (f"from tools import quiet, flags\n{TRAINS}", "", False),
        (f"import tools.flags\n{TRAINS}", "", False),
        (f"from ........................ import x\n{TRAINS}", "", False),
        (f"exec(open('x').read())\n{TRAINS}", "", False),
        ("it is not python (", "", False),
    ],
)
def test_only_what_certainly_reads_no_flags_has_no_parser(
    tmp_path: Path, script: str, beside: str, is_certain: bool
) -> None:
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "beside.py").write_text(beside)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__init__.py").write_text("from .quiet import model\n")
    (tmp_path / "tools" / "quiet.py").write_text("import torch\n")
    (tmp_path / "tools" / "flags.py").write_text("import argparse\n")
    assert is_parserless(str(tmp_path / "train.py")) is is_certain


@pytest.mark.parametrize(
    ("source", "is_rejected"),
    [
        ("args = parser.parse_args()", True),
        ("args, rest = parser.parse_known_args()", False),
        ("args = parser.parse_args(own)", False),
        ("parser.add_argument('rest', nargs='*')\nargs = parser.parse_args()", False),
        ("load_config()", False),
    ],
)
def test_a_parser_that_rejects_the_configs_words_is_found(
    tmp_path: Path, source: str, is_rejected: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    found = settings_problem(str(script), ["--epochs", "3", "name=k1"])
    assert (found is not None) is is_rejected
    assert settings_problem(str(script), ["--epochs=3"]) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lr=0.1"], "--lr: the script has no parser that reads it; write optimization.learn"),
        (["--wd", "0.1"], "--wd: the script has no parser that reads it; "),
        (["--local-rank=0", "--deepspeed"], ""),  # a launcher adds these to every script's words
    ],
)
def test_flags_of_a_script_that_reads_none_are_refused(
    tmp_path: Path, words: list[str], said: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"from drivetrain import load_config\nload_config(defaults={DEFAULTS})\n")
    command = [sys.executable, str(script), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) is (not said)
    assert said in done.stderr


def test_words_that_are_handed_over_are_all_the_configs() -> None:
    with pytest.raises(ConfigError, match="--width: not an override"):
        load_config(argv=["--width", "3"], defaults=DEFAULTS)


@pytest.mark.parametrize(
    ("argv", "refused"),
    [
        (["--width", "3"], ["--width"]),
        (["--shift", "-1", "2", "seed=1"], ["--shift"]),
        (["--width=3", "fast"], ["--width=3", "fast"]),
        (["--sizes=wide.yaml", "fast"], ["--sizes=wide.yaml", "fast"]),
        (["--width", "3", "seed=1", "fast"], ["--width", "fast"]),
        (["--width", "3", "-v"], ["--width", "-v"]),
    ],
)
def test_a_refused_flags_values_are_not_refused_as_well(
    argv: list[str], refused: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(argv=argv, defaults=DEFAULTS)
    assert [problem.where for problem in raised.value.problems] == refused


def test_ranks_cannot_import_what_a_notebook_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None: ...

    monkeypatch.setattr(body, "__module__", "__main__")
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(EnvironmentProblem, match="body: was defined in a notebook"):
        run_ranks(body, 2)


def test_a_real_kernel(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    code = f"import drivetrain\nprint(drivetrain.load_config(defaults={DEFAULTS}).config.max_steps)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(
        notebook, timeout=60, resources={"metadata": {"path": tmp_path}}
    ).execute()
    assert notebook.cells[0].outputs[0]["text"] == "5\n"
