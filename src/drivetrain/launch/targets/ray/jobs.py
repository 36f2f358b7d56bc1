"""Ray's Jobs API, as far as a target needs it: the I/O boundary to the cluster."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from drivetrain.core.errors import DrivetrainError, EnvironmentProblem, Problem
from drivetrain.core.requirements import require
from drivetrain.launch.target import State, Status
from drivetrain.launch.targets.ray import tokens
from drivetrain.supervise.policy import PREEMPTED_CODE

_STATES = {
    "PENDING": State.WAITING,
    "RUNNING": State.RUNNING,
    "STOPPED": State.STOPPED,
    "SUCCEEDED": State.FINISHED,
    "FAILED": State.FAILED,
}
_ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")


def connect(address: str | None) -> Any:
    """A client of the cluster's job server."""
    headers = tokens.headers()  # before Ray is imported
    module = require("ray.job_submission", extra="ray")
    require("aiohttp", extra="ray")
    try:
        with _given_address_wins(address):
            return module.JobSubmissionClient(address, headers=headers)
    except _wrong_token() as error:
        rule, remedy = tokens.in_words(str(error))
        raise EnvironmentProblem([Problem("--address", rule, remedy, address)]) from None
    except (ConnectionError, RuntimeError, ValueError) as error:
        shown = address or next((os.environ[n] for n in _ADDRESSES if n in os.environ), None)
        raise _unreachable(shown, str(error)) from None


def _wrong_token() -> type[Exception]:
    """What Ray raises for it; older ones know no tokens."""
    exceptions = require("ray.exceptions", extra="ray")
    found: type[Exception] = getattr(exceptions, "AuthenticationError", PermissionError)
    return found


@contextmanager
def _given_address_wins(address: str | None) -> Iterator[None]:
    """Ray lets its variables win over what was said; a flag is said later than a variable."""
    hidden = {n: os.environ.pop(n) for n in _ADDRESSES if address is not None and n in os.environ}
    try:
        yield
    finally:
        os.environ |= hidden


def _unreachable(address: str | None, reason: str) -> EnvironmentProblem:
    lines = [line for line in reason.strip().splitlines() if line.strip()]
    rule = f"no Ray job server answers there ({lines[0] if lines else 'no reason given'})"
    remedy = "start one with `ray start --head`, or give --address http://HEAD:8265"
    if address is None:
        return EnvironmentProblem([Problem("--address", rule, remedy, has_value=False)])
    return EnvironmentProblem([Problem("--address", rule, remedy, address)])


def submit(
    address: str | None, entrypoint: str, runtime_env: dict[str, Any], name: str
) -> tuple[str, str]:
    """The job server's own address, whichever way in was given, and Ray's id of the job."""
    client = connect(address)
    with _told_plainly():
        made: str = client.submit_job(
            entrypoint=entrypoint, runtime_env=runtime_env, metadata={"name": name}
        )
    return client.get_address(), made


def poll(address: str, job_id: str) -> Status:
    """What Ray says of the job."""
    client = connect(address)
    try:
        info = client.get_job_info(job_id)
    except RuntimeError:
        return Status(State.UNKNOWN, f"Ray does not know job {job_id}: was the cluster restarted?")
    return status_of(str(info.status), info.driver_exit_code, info.message or "")


def status_of(word: str, exit_code: int | None, message: str) -> Status:
    """Pure: Ray's words in ours. A driver that leaves with 75 has saved because it was asked to."""
    state = _STATES.get(word, State.UNKNOWN)
    if state is State.FAILED and exit_code == PREEMPTED_CODE:
        return Status(State.STOPPED, "saved", exit_code=exit_code)
    lines = message.strip().splitlines()
    detail = lines[0] if lines and state is not State.FINISHED else ""
    return Status(state, detail, exit_code=exit_code)


def logs(address: str, job_id: str, *, follow: bool) -> Iterator[str]:
    """What the driver and, through it, the workers printed."""
    client = connect(address)
    with _told_plainly():
        if not follow:
            yield client.get_job_logs(job_id)
            return
        num_seen = 0
        while True:
            for piece in _unseen(_stream(client, job_id), num_seen):
                num_seen += len(piece)
                yield piece
            if client.get_job_status(job_id).is_terminal():
                break
            time.sleep(1.0)  # a busy server ends a stream before the job has ended
        # what was printed last may not have come through
        yield client.get_job_logs(job_id)[num_seen:]


def _stream(client: Any, job_id: str) -> Iterator[str]:
    """Ray gives an asynchronous one, from the beginning; the client is not."""
    with asyncio.Runner() as runner:
        pieces = client.tail_job_logs(job_id)
        while (piece := runner.run(anext(pieces, None))) is not None:
            yield piece


def _unseen(pieces: Iterator[str], num_seen: int) -> Iterator[str]:
    """Without the letters that were there before."""
    for piece in pieces:
        rest = piece[num_seen:]
        num_seen = max(0, num_seen - len(piece))
        if rest:
            yield rest


def end(address: str, job_id: str) -> None:
    """End the driver, and with it everything it started."""
    with _told_plainly():
        connect(address).stop_job(job_id)


@contextmanager
def _told_plainly() -> Iterator[None]:
    """Ray's own reason, without its traceback."""
    try:
        yield
    except (RuntimeError, ConnectionError) as error:
        raise DrivetrainError(f"ray: {str(error).strip()}") from None
    except _wrong_token() as error:
        raise DrivetrainError(f"ray: {'; '.join(tokens.in_words(str(error)))}") from None
