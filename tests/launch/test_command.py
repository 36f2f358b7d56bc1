from __future__ import annotations

import pytest
from torch.distributed.run import get_args_parser

from drivetrain.core.errors import ConfigError
from drivetrain.launch.command import Command, parse_command


def parse(line: str) -> Command:
    return parse_command(line.split(), get_args_parser())


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
        ("", "SCRIPT: not given"),
        ("--nprok-per-node 2 train.py", "did you mean --nproc-per-node?"),
        ("--num_processes 2 train.py", "did you mean --nproc-per-node?"),
        ("--num-processes=2 train.py", "did you mean --nproc-per-node?"),
        ("--num_machines 2 train.py", "did you mean --nnodes?"),
        ("--script train.py --backend mpi", "--backend = mpi: no such backend"),
        ("train.py --nnodes", "--nnodes: needs a value"),
    ],
)
def test_what_cannot_be_meant_is_said(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(line)
    assert message in str(caught.value)


def test_torchrun_itself_understands_the_result() -> None:
    args = get_args_parser().parse_args(parse("--num-gpus 2 train.py --lr 1").torchrun_args)
    assert (args.nproc_per_node, args.training_script) == ("2", "train.py")
    assert args.training_script_args == ["--lr", "1"]
