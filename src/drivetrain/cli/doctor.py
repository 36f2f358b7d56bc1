"""`drivetrain doctor` and `drivetrain env`."""

from __future__ import annotations

import json
import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.core.errors import ConfigError

if TYPE_CHECKING:
    from drivetrain.doctor.channels import Channel
    from drivetrain.doctor.examine import HostQuestion


@dataclass(frozen=True)
class DoctorRequest:
    """The command's options, as typed."""

    argv: tuple[str, ...]
    on: str | None
    hosts: str | None
    cluster: str | None
    run_dir: str | None
    store: str | None
    ports: tuple[int, ...]
    meet: str | None
    members: int | None
    ssh: str
    target_grace_s: float | None
    as_json: bool


def run(asked: DoctorRequest) -> int:
    """Examine the hosts and judge the results; return 1 if something would break a run."""
    from drivetrain.cli.say import say
    from drivetrain.cli.terminal import terminal
    from drivetrain.core.finding import together
    from drivetrain.doctor.checks import judge
    from drivetrain.doctor.examine import examine
    from drivetrain.doctor.report import as_dict, as_lines

    question = _question(asked)
    with _channels(asked, question) as channels:
        if channels is None:  # this host has answered; the first host of the job reports
            return 0
        with terminal(stderr=True).status("") as status:  # shown on a terminal only
            examination, lost = examine(channels, question, status.update)
    findings = together([*lost, *judge(examination)])
    if asked.as_json:
        sys.stdout.write(json.dumps(as_dict(examination, findings), indent=2) + "\n")
    else:
        say("\n".join(as_lines(examination, findings)))
    return 1 if any(finding.severity == "error" for finding in findings) else 0


def _question(asked: DoctorRequest) -> HostQuestion:
    from drivetrain.doctor.checks.settings import target_problem
    from drivetrain.doctor.examine import HostQuestion
    from drivetrain.doctor.facts import Expected
    from drivetrain.doctor.question import ports_of, read_expected, read_train_flags, timeouts_of

    if asked.on is not None and (problem := target_problem(asked.on)):
        raise ConfigError([problem])
    given = read_train_flags(asked.argv)
    return HostQuestion(
        ports=ports_of(given, asked.ports),
        run_dir=asked.run_dir or given.flags.get("--run-dir"),
        store=asked.store or given.values.get("checkpoint.directory"),
        target=asked.on,
        expected=read_expected(asked.cluster) if asked.cluster else Expected(),
        timeouts=timeouts_of(given, asked.target_grace_s),
    )


@contextmanager
def _channels(asked: DoctorRequest, question: HostQuestion) -> Iterator[Sequence[Channel] | None]:
    from drivetrain.doctor.channels import ChannelLimits, Here, meeting, num_members, over_ssh
    from drivetrain.launch.targets.hosts import read_hosts

    if asked.meet is not None:
        limits = ChannelLimits(question.ports, tuple(question.places))
        with meeting(Path(asked.meet), num_members(asked.members), limits) as met:
            yield met
        return
    if asked.hosts is None:
        channels: list[Channel] = [Here(socket.gethostname())]
    else:
        ssh = shlex.split(asked.ssh)
        machines = read_hosts(Path(asked.hosts))
        channels = [over_ssh(machine.name, ssh, sys.executable) for machine in machines]
    try:
        yield channels
    finally:
        for channel in channels:
            channel.close()


def show_env() -> int:
    from drivetrain.doctor.host import host_facts
    from drivetrain.doctor.report import paste_lines

    sys.stdout.write("\n".join(paste_lines(host_facts())) + "\n")
    return 0
