"""`drivetrain train` as a user calls it: real processes, real output."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest
from typer.testing import CliRunner

from drivetrain.cli.main import app, with_flags_of
from drivetrain.core.errors import ConfigError
from drivetrain.launch.early import starting_line

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "scripts"


def drivetrain(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "drivetrain", *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        check=False,
    )


def test_a_torchrun_script_runs_unchanged() -> None:
    script = str(SCRIPTS / "torchrun_style.py")
    result = drivetrain("train", "--nproc-per-node", "2", script, "--value", "2", "a.b=3")
    assert result.returncode == 0, result.stderr
    assert "sum 12.0 rest ['a.b=3']" in result.stdout
    assert "OMP_NUM_THREADS" not in result.stderr


def test_what_is_started_is_said_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; sys.stderr.write('a rank\\n')\n")
    result = drivetrain("train", "--nproc-per-node", "2", "script.py", cwd=tmp_path)
    expected = ["starting 2 processes on this machine", "a rank", "a rank"]
    assert result.stderr.splitlines() == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--nproc-per-node=two"],
            "--nproc-per-node = two: must be a whole number, at least 1, or auto, cpu, gpu or xpu; "
            "write --nproc-per-node 2",
        ),
        (
            ["--nproc-per-node=xpu"],
            "--nproc-per-node = xpu: this node has no such device; write --nproc-per-node 2",
        ),
        (
            ["--nnodes=3:1"],
            "--nnodes = 3:1: the maximum is less than the minimum; write --nnodes 1:3",
        ),
        (
            ["--stall-timeout=abc"],
            "--stall-timeout = abc: must be a number of seconds, more than 0, or inf; "
            "write --stall-timeout 60",
        ),
    ],
)
def test_a_wrong_value_of_a_flag_is_refused_in_one_line(
    tmp_path: Path, words: list[str], said: str
) -> None:
    (tmp_path / "script.py").touch()
    result = drivetrain("train", *words, "script.py", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (2, f"{said}\n")


def test_more_ranks_than_memory_can_hold_are_refused_before_any_starts(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("open('started', 'a')")
    result = drivetrain("train", "--nproc-per-node=1000000", "script.py", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("--nproc-per-node = 1000000: ")
    assert "of memory can be used here" in result.stderr
    assert "rehearse --world-size 1000000" in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--start-method=x"],
        ["--logs-specs=x"],
        ["--rdzv-backend=x", "--rdzv-endpoint=localhost"],
        ["--no-python", "-m"],
    ],
)
def test_what_torch_refuses_is_told_without_a_traceback(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "script.py").touch()
    result = drivetrain("train", *words, "script.py", cwd=tmp_path)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "usage:" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith(("--", "torchrun's flags: "))


def test_a_flag_of_the_launcher_that_the_script_gets_is_told(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print(sys.argv[1:])")
    words = ["script.py", "--log-dir", "logs"]
    result = drivetrain("train", *words, cwd=tmp_path)
    assert result.stdout == "['--log-dir', 'logs']\n"
    assert "note: --log-dir stands after script.py and was passed to it;" in result.stderr
    quiet = drivetrain("train", "script.py", "--", *words[1:], cwd=tmp_path)
    assert quiet.stdout == result.stdout
    assert "note" not in quiet.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["status"], "RUN: not given; run drivetrain status --help"),
        (["compare", "runs/one"], "OTHER_RUN: not given; run drivetrain compare --help"),
        (["status", "a", "b", "c"], "b c: not expected; run drivetrain status --help"),
        (["status", "--foo", "x"], "--foo: unknown option; run drivetrain status --help"),
        (["--foo"], "--foo: unknown option; run drivetrain --help"),
        (["statsu", "x"], "statsu: unknown command; did you mean status?"),
        (["verify", "foo"], "foo: unknown command; run drivetrain verify --help"),
        (
            ["verify", "parity", "x.py", "--layouts"],
            "--layouts: needs a value; write --layouts VALUE",
        ),
        (
            ["verify", "parity", "x.py"],
            "--layouts: not given; run drivetrain verify parity --help",
        ),
        (
            ["verify", "resume", "x.py", "--steps", "ten"],
            "--steps = ten: must be a whole number; run drivetrain verify resume --help",
        ),
        (
            ["watch", "runs/x", "--every=often"],
            "--every = often: must be a number; run drivetrain watch --help",
        ),
        (
            ["probe", "--nproc-per-node", "0"],
            "--nproc-per-node = 0: must be at least 1; run drivetrain probe --help",
        ),
        (
            ["drill", "x.py", "--nproc-per-node=-1"],
            "--nproc-per-node = -1: must be at least 1; run drivetrain drill --help",
        ),
        (
            ["doctor", "--port", "3", "--port", "x"],
            "--port = 3, x: must be a whole number; run drivetrain doctor --help",
        ),
        (
            ["doctor", "--on", "slum"],
            "--on = slum: unknown; use slurm, kubernetes, ray, torchrun",
        ),
        (
            ["tune", "x.py", "--space=s", "--nproc-per-trial=0"],
            "--nproc-per-trial = 0: must be at least 1; run drivetrain tune run --help",
        ),
    ],
)
def test_a_wrong_value_of_another_commands_option_is_refused_in_one_line(
    words: list[str], said: str
) -> None:
    result = CliRunner().invoke(app, words, prog_name="drivetrain")
    assert str(result.exception) == said
    assert isinstance(result.exception, ConfigError)


@pytest.mark.parametrize(
    "words",
    [
        ["gone.py"],
        ["--nproc-per-node=0", "script.py"],
        ["--nproc-per-node=many", "script.py"],
        ["--nproc-per-node=1000000", "script.py"],
        ["--no-such-flag", "script.py"],
        ["--nnodes=2", "--run-dir=run", "script.py"],
    ],
)
def test_nothing_is_said_of_a_start_that_may_be_refused_or_is_one_of_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    assert starting_line(["script.py"]) is not None
    assert starting_line(words) is None


def test_a_machine_with_devices_starts_a_process_on_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "device").touch()
    (tmp_path / "script.py").touch()
    monkeypatch.setattr("drivetrain.launch.early._DRIVERS", (str(tmp_path / "device"),))
    script = str(tmp_path / "script.py")
    assert starting_line([script]) == "starting one process per device on this machine"
    assert starting_line(["--nproc-per-node=1", script]) == "starting 1 process on this machine"


def test_the_first_failing_ranks_traceback_comes_last() -> None:
    script = str(SCRIPTS / "torchrun_style.py")
    result = drivetrain("train", script, "--nproc-per-node", "2", "--fail-rank", "1")
    assert result.returncode == 1
    assert result.stderr.rstrip().endswith("ValueError: rank 1 has had enough")
    assert "rank 1 (pid" in result.stderr
    assert "ChildFailedError" not in result.stderr
    assert "runpy" not in result.stderr


@pytest.mark.slow
@pytest.mark.long  # test_supervision.py has one that is killed and named
def test_a_killed_rank_is_named() -> None:
    script = str(SCRIPTS / "torchrun_style.py")
    words = ["--script", script, "--num-gpus", "2", "--backend", "pytorch-ddp"]
    result = drivetrain("train", *words, "--kill-rank", "1")
    assert result.returncode == 137
    assert "rank 1 (pid" in result.stderr
    assert "killed by SIGKILL" in result.stderr


def test_a_code_that_the_script_chose_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; sys.exit(7)\n")
    result = drivetrain("train", "--nproc-per-node", "2", "script.py", cwd=tmp_path)
    assert result.returncode == 7
    assert "failed first: exit code 7" in result.stderr


def test_a_stopped_launcher_leaves_no_rank_behind(tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    script.write_text(
        "import os, pathlib, time\n"
        "pathlib.Path(os.environ['RANK'] + '.pid').write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "drivetrain", "train", "--nproc-per-node", "2", str(script)]
    launcher = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline_s = time.monotonic() + 60
    while len(list(tmp_path.glob("*.pid"))) < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    time.sleep(0.5)
    pids = [int(file.read_text()) for file in tmp_path.glob("*.pid")]
    launcher.send_signal(signal.SIGTERM)
    _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM; all ranks were killed" in stderr
    assert "Traceback" not in stderr
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_config_mistake_is_shown_without_a_traceback(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import drivetrain\ndrivetrain.load_config()\n")
    result = drivetrain("train", str(script), "global_batchsize=3", "max_steps=1")
    assert result.returncode == 2
    assert "did you mean global_batch_size?" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["train", "mine.py", "--epochs", "3", "name=k1"],
        ["verify", "resume", "mine.py", "--steps", "4"],
        ["verify", "parity", "mine.py", "--layouts", "ddp:2", "--steps", "2"],
    ],
)
def test_a_parser_that_rejects_the_configs_arguments_is_told(
    tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--epochs')\nargs = parser.parse_args()\n"
    )
    result = drivetrain(*command, cwd=tmp_path)
    last = result.stderr.rstrip().splitlines()[-1]
    assert result.returncode == 2
    assert last.startswith("SCRIPT = mine.py: its parser accepts no key=value arguments, such as ")
    assert "args, rest = parser.parse_known_args() and load_config(argv=rest)" in last
    assert "NOT certified" not in result.stdout


def test_a_script_finds_its_neighbours_and_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("VALUE = 7\n")
    script = tmp_path / "train.py"
    script.write_text("import sys, neighbour\nprint(neighbour.VALUE, sys.argv, __name__)\n")
    result = drivetrain("train", str(script), "--own", "flag", cwd=ROOT)
    assert result.stdout.strip() == f"7 ['{script}', '--own', 'flag'] __main__"


DROP_IN = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from drivetrain import PyTorchDDPTrainer

generator = torch.Generator().manual_seed(0)
x = torch.randn(203, 20, generator=generator)
data = TensorDataset(x, (x.sum(1) > 0).long())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x):
        if "fail" in sys.argv and torch.distributed.get_rank() == 1:
            raise ValueError("trouble on rank 1")
        return self.layers(x)


trainer = PyTorchDDPTrainer(
    model=Model(), num_gpus=2, batch_size=8, epochs=3, learning_rate=0.01,
    gradient_accumulation_steps=2, tensorboard_dir="runs",
)
history = trainer.fit(
    DataLoader(data, batch_size=8, shuffle=True), DataLoader(data), checkpoint_dir="saved"
)
print(f"time {history.total_time:.2f} accuracy {history.best_accuracy:.4f}")
"""


def run_drop_in(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(DROP_IN)
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=tmp_path, check=False
    )


def test_the_drop_in_trainer_starts_its_own_ranks(tmp_path: Path) -> None:
    """As the documents write it: no launcher, no main guard."""
    result = run_drop_in(tmp_path, "train.py")
    assert result.returncode == 0, result.stderr
    assert "micro-batch 8 × accumulation 2 × 2 ranks" in result.stdout
    assert "evaluated 203 of 203" in result.stdout
    assert result.stdout.count("accuracy 0.") >= 2
    assert result.stdout.count("time ") == 1  # the other rank is quiet
    assert (tmp_path / "saved" / "weights.pt").exists()
    assert list(tmp_path.glob("runs/*/tensorboard/events*"))


@pytest.mark.slow
@pytest.mark.long
def test_the_drop_in_trainer_uses_ranks_that_are_there(tmp_path: Path) -> None:
    words = ["-m", "drivetrain", "train", "--nproc-per-node", "2", "train.py"]
    result = run_drop_in(tmp_path, *words)
    assert result.returncode == 0, result.stderr
    assert "accumulation 2 × 2 ranks" in result.stdout


@pytest.mark.slow
@pytest.mark.long
def test_a_failing_rank_of_the_drop_in_trainer_says_why(tmp_path: Path) -> None:
    result = run_drop_in(tmp_path, "train.py", "fail")
    assert result.returncode != 0
    assert (
        "ValueError: trouble on rank 1"
        in result.stderr.splitlines()[-2:][0] + (result.stderr.splitlines()[-1])
    )


@pytest.mark.slow
@pytest.mark.long
def test_a_rank_that_never_joins_does_not_hold_the_drop_in_trainer(tmp_path: Path) -> None:
    early = "import os\nif os.environ.get('RANK') == '1':\n    raise OSError('no such disk')\n"
    (tmp_path / "train.py").write_text(early + DROP_IN)
    start_s = time.monotonic()
    result = subprocess.run(
        [sys.executable, "train.py"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert result.returncode == 5
    assert "OSError: no such disk" in result.stderr
    assert time.monotonic() - start_s < 60


def _processor_seconds_of(code: str, *arguments: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.DEVNULL, check=True, timeout=60
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.alone
def test_help_is_quick_and_loads_no_torch() -> None:
    # A machine has its own speed, which also changes from second to second: what counts is what we
    # add to the library that prints the help, measured in turns.
    ratios = []
    for _ in range(9):
        typer_s = _processor_seconds_of("import typer")
        help_s = _processor_seconds_of("from drivetrain.cli.main import main; main()", "--help")
        ratios.append(help_s / typer_s)
    assert median(ratios) < 1.6
    imports = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import drivetrain, drivetrain.cli.main"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ},
    ).stderr
    assert "drivetrain" in imports
    assert " torch" not in imports
    assert " yaml" not in imports


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["checkpoint", "ls", "--help"],
        ["verify", "resume", "--help"],
        ["bench"],
        ["trian"],
    ],
)
def test_verbs_whose_flags_are_not_read_are_listed_all_the_same(argv: list[str]) -> None:
    whole = CliRunner().invoke(app, argv)
    narrow = CliRunner().invoke(with_flags_of(app, argv), argv)
    assert (narrow.exit_code, narrow.output) == (whole.exit_code, whole.output)
    assert whole.output or isinstance(whole.exception, ConfigError)
    assert str(narrow.exception) == str(whole.exception)


@pytest.mark.parametrize("words", [["config"], ["config", "global_batch_size=8", "max_steps=2"]])
def test_the_config_verb_lists_and_checks(words: list[str]) -> None:
    result = drivetrain(*words)
    assert result.returncode == 0
    assert "optimization" in result.stdout
    wrong = drivetrain("config", "max_step=2")
    assert wrong.returncode == 2
    assert "did you mean max_steps?" in wrong.stderr


def test_a_job_whose_time_is_up_while_it_starts_is_to_be_started_again() -> None:
    script = str(SCRIPTS / "torchrun_style.py")
    command = [sys.executable, "-m", "drivetrain", "train", script]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline_s = time.monotonic() + 30
        while not children.read_text() and time.monotonic() < deadline_s:
            time.sleep(0.001)
        process.send_signal(signal.SIGUSR1)  # the supervisor has only just begun to import
        assert process.wait(timeout=60) == 75


def test_a_module_may_be_named_by_torchruns_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "mod.py").write_text("print('in', __package__)\n")
    monkeypatch.setenv("PET_MODULE", "1")
    result = drivetrain("train", "--nproc-per-node", "1", "pkg.mod", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "in pkg\n"), result.stderr
