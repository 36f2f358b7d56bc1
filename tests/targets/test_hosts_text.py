"""Hosts files and the commands they come to."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.launch.coordinator.member import read_members
from drivetrain.launch.job import Job
from drivetrain.launch.request import read_request
from drivetrain.launch.targets.hosts import SshHosts, SshMachine, read_hosts


def test_a_hosts_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# two machines\nnode-a slots=8\n\nme@node-b slots=8 address=10.0.0.2 # b\n")
    machines = read_hosts(path)
    assert machines == (SshMachine("node-a", 8), SshMachine("me@node-b", 8, "10.0.0.2"))
    assert [machine.reached_at for machine in machines] == ["node-a", "10.0.0.2"]
    assert SshMachine("me@node-c").reached_at == "node-c"


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("", ["lists no machine"]),
        ("a\na\n", ["hosts = a: named twice"]),
        ("a slots=0\nb rank=3\n", ["hosts:1 = 0: slots must be", "hosts:2 = rank=3: not under"]),
        ("a slots=2\nb slots=4\n", ["= a: 2, b: 4: all machines must have the same number"]),
    ],
)
def test_a_wrong_hosts_file_says_everything(tmp_path: Path, text: str, messages: list[str]) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_hosts(path)
    for message in messages:
        assert message in str(error.value)


def test_the_file_says_how_many_unless_flags_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\nc slots=4\n")

    def shape(line: str) -> tuple[int, int]:
        request = read_request(line.split())
        assert request is not None
        return request.job.num_nodes, request.job.processes_per_node

    assert shape("--hosts hosts -m train") == (3, 4)
    assert shape("--on hosts --hosts hosts --nodes 2 -m train") == (2, 4)
    assert shape("--hosts hosts --nproc-per-node 1 -m train") == (3, 1)


def test_more_nodes_than_machines_are_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\n")
    job = Job("j", "train", (), ("-m",), "/r", "/w", num_nodes=2, max_nodes=2)
    problems = SshHosts(hosts=str(tmp_path / "hosts")).problems(job)
    assert "--nnodes = 2:" in str(problems[0])
    assert "lists 1" in str(problems[0])


def test_members_are_one_ssh_each_and_survive_the_file(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\nme@b address=10.0.0.2\n")
    job = Job(
        name="j",
        script="train.py",
        script_args=("--title", "it's mine"),
        flags=(),
        run_dir="/shared/run",
        working_dir="/shared/my code",
        num_nodes=2,
        max_nodes=2,
        environment=(("A", "b c"),),
    )
    target = SshHosts(hosts=str(tmp_path / "hosts"), python="/venv/bin/python", ssh="ssh -p 2222")
    path = tmp_path / "job.yaml"
    path.write_text(target.render(job).text)
    members = read_members(path)
    assert [member.host for member in members.members] == ["a", "me@b"]
    assert members.members[1].command == (
        "ssh",
        "-p",
        "2222",
        "me@b",
        "cd '/shared/my code' && exec env 'A=b c' /venv/bin/python"
        " -m drivetrain.launch.coordinator.stdin_watchdog --nnodes=2 --nproc-per-node=1"
        " --run-dir=/shared/run --grace-period=30"
        """ --local-addr=10.0.0.2 train.py -- --title 'it'"'"'s mine'""",
    )


def test_a_folder_is_no_hosts_file_and_is_not_to_be_removed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r": a folder, not a file; give a file$"):
        read_hosts(tmp_path)
