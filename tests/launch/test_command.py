from __future__ import annotations

import pytest
from torch.distributed.run import get_args_parser

from drivetrain.core.errors import ConfigError
from drivetrain.launch.command import Command, add_our_flags, note_on, parse_command, parse_flags
from drivetrain.launch.flag_values import environment_problems


def parse(line: str) -> Command:
    parser = get_args_parser()
    add_our_flags(parser)
    return parse_command(line.split(), parser)


@pytest.mark.parametrize(
    ("line", "launcher", "script", "arguments"),
    [
        ("train.py", (), "train.py", ()),
        (
            "--nproc-per-node 2 train.py --lr 0.1",
            ("--nproc-per-node=2",),
            "train.py",
            ("--lr", "0.1"),
        ),
        ("--nproc_per_node=2 train.py", ("--nproc-per-node=2",), "train.py", ()),
        (
            "train.py --nproc-per-node 4 --nnodes=2 global_batch_size=64",
            ("--nproc-per-node=4", "--nnodes=2"),
            "train.py",
            ("global_batch_size=64",),
        ),
        (
            "--script train.py --num-gpus 2 --backend pytorch-ddp",
            ("--nproc-per-node=2",),
            "train.py",
            (),
        ),
        (
            "--script train.py --num-nodes 4 --gpus-per-node 8 --epochs 3",
            ("--nnodes=4", "--nproc-per-node=8"),
            "train.py",
            ("--epochs", "3"),
        ),
        (
            "--script train.py --backend horovod max_steps=3",
            (),
            "train.py",
            ("parallel.strategy=horovod", "max_steps=3"),
        ),
        # the script's own: torchrun would hand these on, and so do we
        ("train.py --log-dir x", (), "train.py", ("--log-dir", "x")),
        ("train.py --num-gpus 8", (), "train.py", ("--num-gpus", "8")),
        ("train.py -- --nnodes 3", (), "train.py", ("--nnodes", "3")),
        ("train.py --lr 1 --nnodes 3", (), "train.py", ("--lr", "1", "--nnodes", "3")),
        (
            "train.py --stall-timeout 5 max_steps=3",
            ("--stall-timeout=5",),
            "train.py",
            ("max_steps=3",),
        ),
        ("--standalone -m package.train", ("--standalone", "-m"), "package.train", ()),
    ],
)
def test_a_command_line_is_taken_apart(
    line: str, launcher: tuple[str, ...], script: str, arguments: tuple[str, ...]
) -> None:
    assert parse(line) == Command(script, arguments, launcher)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "SCRIPT: not given; run drivetrain train"),
        ("--nproc 2 train.py", "did you mean --nproc-per-node?"),
        ("-n 2 train.py", "did you mean --nproc-per-node?"),
        ("--lr 0.1 train.py", "--lr: unknown flag; the script's own flags go after the script"),
        ("--nprok-per-node 2 train.py", "did you mean --nproc-per-node?"),
        ("--num_processes 2 train.py", "did you mean --nproc-per-node?"),
        ("--num-processes=2 train.py", "did you mean --nproc-per-node?"),
        ("--num_machines 2 train.py", "did you mean --nnodes?"),
        ("--script train.py --backend mpi", "--backend = mpi: no such backend"),
        ("train.py --nnodes", "--nnodes: needs a value; write --nnodes VALUE"),
        ("--standalone=no train.py", "--standalone = no: takes no value; write --standalone alone"),
    ],
)
def test_what_cannot_be_meant_is_said(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(line)
    assert message in str(caught.value)


def test_a_scripts_flag_may_begin_like_the_launchers() -> None:
    parser = get_args_parser()
    args = parse_flags(parser, parse("--nnodes 1 train.py --nproc 2").torchrun_args)
    assert args.training_script_args == ["--nproc", "2"]


def test_torchrun_itself_understands_the_result() -> None:
    args = get_args_parser().parse_args(parse("--num-gpus 2 train.py --lr 1").torchrun_args)
    assert (args.nproc_per_node, args.training_script) == ("2", "train.py")
    assert args.training_script_args == ["--lr", "1"]


RANKS = "a whole number, at least 1, or auto, cpu, gpu or xpu"


@pytest.mark.parametrize(
    ("flag", "wrong", "accepted"),
    [
        (
            "--nnodes",
            ["x", "0", "1:x", "1:2:3", "2:", ""],
            "a whole number, at least 1, or MIN:MAX",
        ),
        ("--nproc-per-node", ["0", "-1", "1.5"], RANKS),
        ("--num-gpus", ["0"], RANKS),
        ("--max-restarts", ["many", "-1"], "a whole number, at least 0"),
        ("--spares", ["x", "-1", "1.5"], "a whole number, at least 0"),
        ("--stall-timeout", ["abc", "0", "-5", "nan", "1m"], "seconds, more than 0, or inf"),
        ("--grace-period", ["1h", "-1", "inf"], "seconds, 0 or more"),
        ("--master-port", ["foo", "65536"], "a port, 0 to 65535"),
        ("--rdzv-endpoint", ["node:port", ":29400", "[::1]:x"], "HOST or HOST:PORT"),
        ("--rdzv-conf", ["timeout", "a=1,b"], "key=value, with commas"),
        ("--redirects", ["4", "0:9", "stdout"], "0 to 3"),
        ("-t", ["7"], "0 to 3"),
        ("--local-ranks-filter", ["x", "0,,1"], "ranks, with commas"),
    ],
)
def test_a_value_that_a_flag_does_not_accept_is_refused(
    flag: str, wrong: list[str], accepted: str
) -> None:
    for value in wrong:
        with pytest.raises(ConfigError) as caught:
            parse(f"{flag}={value} train.py")
        message = str(caught.value)
        assert message.startswith(f"{flag} = {value}: must be "), message
        assert f"{accepted}" in message
        assert message.count("\n") == 0


def test_every_wrong_value_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("--nnodes=x --spares=x train.py --max-restarts x")
    flags = [problem.where for problem in caught.value.problems]
    assert flags == ["--nnodes", "--spares", "--max-restarts"]


@pytest.mark.parametrize(
    "words",
    [
        "--nnodes=1:2 --nproc-per-node=auto --max-restarts=0 --grace-period=0 --stall-timeout=0.5",
        "--rdzv-endpoint=host --rdzv-conf=a=1,b=2 --redirects=0:3,1:0 -r 3 -t 1 --spares=0",
        "--rdzv-endpoint=[::1]:29400 --rdzv-conf= --local-ranks-filter=0,1 --master-port=0",
        "--rdzv-endpoint=[::1] --nproc-per-node=gpu --monitor-interval=0.1 --stall-timeout=inf",
    ],
)
def test_a_value_that_a_flag_accepts_is_not(words: str) -> None:
    assert parse(f"{words} train.py").script == "train.py"


def test_torchruns_variables_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "x")
    said = "PET_NNODES = x: must be a whole number, at least 1, or MIN:MAX; PET_NNODES=2"
    assert list(map(str, environment_problems(set()))) == [said]
    assert environment_problems({"--nnodes"}) == []


@pytest.mark.parametrize(
    ("line", "passed"),
    [
        ("train.py --lr 1 --stall-timeout 5 --nnodes=3", ("--stall-timeout", "--nnodes")),
        ("train.py --log_dir x --log-dir=y", ("--log-dir",)),
        ("train.py --backend nccl --num-gpus 8 --seed 1 -m x", ("--backend", "--num-gpus")),
        ("train.py -- --log-dir x --nnodes 3", ()),
        ("--log-dir x train.py --nnodes 3 --epochs 2", ()),
    ],
)
def test_flags_of_the_launcher_that_the_script_gets_are_known(
    line: str, passed: tuple[str, ...]
) -> None:
    assert parse(line).passed_flags == passed


def test_the_note_names_the_flags_that_the_script_gets() -> None:
    assert note_on(("--time",), "train.py") == (
        "note: --time stands after train.py and was passed to it; to set Drivetrain's, put it "
        "before the script; put -- after the script to silence this note"
    )
    assert "--time, --env stand after train.py and were passed" in note_on(
        ("--time", "--env"), "train.py"
    )


@pytest.mark.parametrize(
    ("name", "given", "is_wrong"),
    [
        ("PET_REDIRECTS", ["--nproc-per-node"], True),
        ("PET_REDIRECTS", ["-r"], False),
        ("PET_REDIRECTS", ["--redirects"], False),
        ("PET_TEE", ["-r"], True),
        ("PET_R", [], False),  # torchrun does not read it
    ],
)
def test_only_variables_that_torchrun_reads_are_checked_and_only_without_the_flag(
    monkeypatch: pytest.MonkeyPatch, name: str, given: list[str], is_wrong: bool
) -> None:
    monkeypatch.setenv(name, "9")
    assert [each.where for each in environment_problems(given)] == ([name] if is_wrong else [])
