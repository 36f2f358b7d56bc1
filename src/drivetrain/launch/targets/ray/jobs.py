"""The parts of Ray's Jobs API that the target needs: the I/O boundary to the cluster."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drivetrain.core.errors import DrivetrainError, EnvironmentProblem, Problem
from drivetrain.core.requirements import require
from drivetrain.launch.target import State, Status
from drivetrain.supervise.policy import PREEMPTED_CODE

# The token of a Ray cluster that requires one, found where Ray itself looks for it.
#
# A new head requires a token as soon as one exists; clients are refused unless they also set
# `RAY_AUTH_MODE=token`. Users should not have to set that if there is a token.

MODE = "RAY_AUTH_MODE"
VARIABLE, PATH_VARIABLE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_REMEDY = (
    "copy the head's token (`ray get-auth-token` there) to ~/.ray/auth_token,"
    " or set RAY_AUTH_TOKEN_PATH to its path"
)


def cluster_token() -> str | None:
    """Return this user's token; None if there is none, or if it must not be used."""
    if os.environ.get(MODE, "token").lower() != "token":
        return None
    if given := os.environ.get(VARIABLE):
        return given
    path = os.environ.get(PATH_VARIABLE) or Path.home() / ".ray" / "auth_token"
    try:
        return Path(path).read_text().strip() or None
    except OSError:
        return None


def token_headers() -> dict[str, str] | None:
    """Headers for the job server; sets the mode for Ray's other clients, read on import."""
    found = cluster_token()
    if found is None:
        return None
    os.environ.setdefault(MODE, "token")
    return {"Authorization": f"Bearer {found}"}


def about_tokens(reason: str) -> tuple[str, str]:
    """Return the rule and the remedy for a missing or wrong token."""
    lines = reason.strip().splitlines()
    return f"the cluster requires a token ({lines[0] if lines else 'refused'})", _REMEDY


_STATES = {
    "PENDING": State.WAITING,
    "RUNNING": State.RUNNING,
    "STOPPED": State.STOPPED,
    "SUCCEEDED": State.FINISHED,
    "FAILED": State.FAILED,
}
_ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")


def connect(address: str | None) -> Any:
    """Return a client of the cluster's job server."""
    headers = token_headers()  # before Ray is imported
    module = require("ray.job_submission", extra="ray")
    require("aiohttp", extra="ray")
    try:
        with _given_address_wins(address):
            return module.JobSubmissionClient(address, headers=headers)
    except _wrong_token() as error:
        rule, remedy = about_tokens(str(error))
        raise EnvironmentProblem([Problem("--address", rule, remedy, address)]) from None
    except (ConnectionError, RuntimeError, ValueError) as error:
        shown = address or next((os.environ[n] for n in _ADDRESSES if n in os.environ), None)
        raise _unreachable(shown, str(error)) from None


def _wrong_token() -> type[Exception]:
    """Return the exception that Ray raises for a wrong token; older versions have none."""
    exceptions = require("ray.exceptions", extra="ray")
    found: type[Exception] = getattr(exceptions, "AuthenticationError", PermissionError)
    return found


@contextmanager
def _given_address_wins(address: str | None) -> Iterator[None]:
    """Hide Ray's address variables: Ray prefers them to an explicit address."""
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
    """Submit a job; return the job server's own address and Ray's job id."""
    client = connect(address)
    with _told_plainly():
        made: str = client.submit_job(
            entrypoint=entrypoint, runtime_env=runtime_env, metadata={"name": name}
        )
    return client.get_address(), made


def poll(address: str, job_id: str) -> Status:
    """Ask Ray for the job's status."""
    client = connect(address)
    try:
        info = client.get_job_info(job_id)
    except RuntimeError:
        return Status(
            State.UNKNOWN, f"Ray does not know job {job_id}; the cluster may have been restarted"
        )
    return status_of(str(info.status), info.driver_exit_code, info.message or "")


def status_of(word: str, exit_code: int | None, message: str) -> Status:
    """Translate Ray's status. Pure. A driver that exits with 75 has saved on request."""
    state = _STATES.get(word, State.UNKNOWN)
    if state is State.FAILED and exit_code == PREEMPTED_CODE:
        return Status(State.STOPPED, "saved", exit_code=exit_code)
    lines = message.strip().splitlines()
    detail = lines[0] if lines and state is not State.FINISHED else ""
    return Status(state, detail, exit_code=exit_code)


def logs(address: str, job_id: str, *, follow: bool) -> Iterator[str]:
    """Yield what the driver and, through it, the workers printed."""
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
        # the stream may have missed the last output
        yield client.get_job_logs(job_id)[num_seen:]


def _stream(client: Any, job_id: str) -> Iterator[str]:
    """Make Ray's asynchronous stream, which starts at the beginning, synchronous."""
    with asyncio.Runner() as runner:
        pieces = client.tail_job_logs(job_id)
        while (piece := runner.run(anext(pieces, None))) is not None:
            yield piece


def _unseen(pieces: Iterator[str], num_seen: int) -> Iterator[str]:
    """Skip the characters that were already yielded."""
    for piece in pieces:
        rest = piece[num_seen:]
        num_seen = max(0, num_seen - len(piece))
        if rest:
            yield rest


def end(address: str, job_id: str) -> None:
    """Stop the driver and everything that it has started."""
    with _told_plainly():
        connect(address).stop_job(job_id)


@contextmanager
def _told_plainly() -> Iterator[None]:
    """Report Ray's own error message, without a traceback."""
    try:
        yield
    except (RuntimeError, ConnectionError) as error:
        raise DrivetrainError(f"ray: {str(error).strip()}") from None
    except _wrong_token() as error:
        raise DrivetrainError(f"ray: {'; '.join(about_tokens(str(error)))}") from None
