"""What Slurm's tools say of a job, read. Pure: from their output to a Status.

squeue knows jobs that are not over; sacct all of them, where accounting is set up; scontrol those
of the last minutes (MinJobAge), with nothing set up.
"""

from __future__ import annotations

import re

from drivetrain.launch.target import State, Status

SQUEUE_FORMAT = "%T|%r|%N"
SACCT_FORMAT = "State,ExitCode,NodeList"

_STATES = {
    "PENDING": State.WAITING,
    "CONFIGURING": State.WAITING,
    "REQUEUED": State.WAITING,
    "REQUEUE_FED": State.WAITING,
    "REQUEUE_HOLD": State.WAITING,
    "SPECIAL_EXIT": State.WAITING,
    "RUNNING": State.RUNNING,
    "COMPLETING": State.RUNNING,
    "SUSPENDED": State.RUNNING,
    "STOPPED": State.RUNNING,
    "SIGNALING": State.RUNNING,
    "STAGE_OUT": State.RUNNING,
    "RESIZING": State.RUNNING,
    "COMPLETED": State.FINISHED,
    "CANCELLED": State.STOPPED,
    "FAILED": State.FAILED,
    "BOOT_FAIL": State.FAILED,
    "DEADLINE": State.FAILED,
    "NODE_FAIL": State.FAILED,
    "OUT_OF_MEMORY": State.FAILED,
    "PREEMPTED": State.FAILED,
    "REVOKED": State.FAILED,
    "TIMEOUT": State.FAILED,
}
_PLAIN_WORDS = {
    "BeginTime": "Slurm starts a requeued job after a pause (cred_expire, two minutes by default)",
    "Resources": "waiting for nodes to be free",
    "Priority": "jobs of higher priority go first",
    "ReqNodeNotAvail": "a node it needs is down or reserved",
    "PartitionTimeLimit": "--time is longer than the partition allows",
    "QOSMaxNodePerUserLimit": "more nodes than the QOS allows one user",
    "AssocGrpNodeLimit": "more nodes than the account allows",
    "JobHeldAdmin": "held by an administrator",
    "JobHeldUser": "held; scontrol release lets it go",
}


def from_squeue(output: str) -> Status | None:
    """`squeue -h -j ID -o FORMAT`; None when it lists nothing."""
    line = output.strip().splitlines()
    if not line:
        return None
    word, reason, nodes = (*line[0].split("|"), "", "")[:3]
    state = _state(word)
    why = "" if reason in ("", "None") else reason
    return Status(state, _detail(word, why), expand(nodes), None)


def from_sacct(output: str) -> Status | None:
    """`sacct -X -n -P -j ID -o FORMAT`; the last line is the job's newest life."""
    lines = output.strip().splitlines()
    if not lines:
        return None
    word, code, nodes = (*lines[-1].split("|"), "", "")[:3]
    return Status(_state(word), _detail(word, ""), expand(nodes), _exit_code(code))


def from_scontrol(output: str) -> Status | None:
    """`scontrol show job -o ID`: words of the form Key=Value."""
    values = dict(re.findall(r"(\w+)=(\S*)", output))
    if "JobState" not in values:
        return None
    word, reason = values["JobState"], values.get("Reason", "None")
    nodes = values.get("NodeList", "(null)")
    return Status(
        _state(word),
        _detail(word, "" if reason == "None" else reason),
        () if nodes == "(null)" else expand(nodes),
        _exit_code(values.get("ExitCode", "")),
    )


def expand(node_list: str) -> tuple[str, ...]:
    """'gpu[003-005,9],login1' → each of them."""
    names: list[str] = []
    for prefix, inside, suffix in re.findall(r"([^,\[\]]+)(?:\[([^\]]*)\])?([^,\[\]]*)", node_list):
        if not inside:
            names.append(prefix + suffix)
            continue
        for part in inside.split(","):
            first, _, last = part.partition("-")
            for number in range(int(first), int(last or first) + 1):
                names.append(f"{prefix}{number:0{len(first)}d}{suffix}")
    return tuple(names)


def _state(word: str) -> State:
    """'CANCELLED by 0' is CANCELLED; a word of a newer Slurm is unknown, and says so itself."""
    return _STATES.get(word.partition(" ")[0].rstrip("+"), State.UNKNOWN)


def _detail(word: str, reason: str) -> str:
    plain = _PLAIN_WORDS.get(reason)
    parts = [word, reason if plain is None else f"{reason}: {plain}"]
    return ", ".join(part for part in parts if part)


def _exit_code(text: str) -> int | None:
    """'75:0' → 75, '0:9' → 137."""
    code, _, number = text.partition(":")
    if not code.isdigit():
        return None
    return 128 + int(number) if int(number or 0) else int(code)
