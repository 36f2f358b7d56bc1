"""What can be known of `--on ray` without a cluster: the driver's text, refusals, verdicts."""

from __future__ import annotations

import ast
import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain.core.errors import EnvironmentProblem
from drivetrain.launch.job import Job
from drivetrain.launch.request import read_request
from drivetrain.launch.target import State
from drivetrain.launch.targets.ray import Ray, jobs
from drivetrain.launch.targets.ray.failures import (
    ScriptFailed,
    as_rank_failure,
    end_of,
    in_words,
)
from drivetrain.launch.targets.ray.jobs import status_of
from drivetrain.record.requests import StopRequest, ask_to_stop
from drivetrain.supervise.policy import EndKind

GOLDEN = Path(__file__).parent.parent / "golden" / "ray"


def a_job(**changes: object) -> Job:
    values: dict[str, object] = {
        "name": "digits",
        "script": "examples/digits.py",
        "script_args": ("max_steps=40",),
        "flags": (),
        "run_dir": "/shared/runs/digits",
        "working_dir": "/shared/project",
        "num_nodes": 2,
        "max_nodes": 2,
    }
    return Job(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "target", "job"),
    [
        ("two_nodes.txt", Ray(address="http://head:8265"), a_job()),
        (
            "elastic_gpus.txt",
            Ray(resources=("high_memory=0.5",), accelerator_type="A100", resize_interval=30),
            a_job(
                max_nodes=4,
                processes_per_node=8,
                gpus_per_node=8,
                flags=("-m", "--max-restarts=5"),
                script="my_team.pretrain",
            ),
        ),
    ],
)
def test_the_driver_is_what_is_written_down(name: str, target: Ray, job: Job) -> None:
    text = target.render(job).text
    ast.parse(text)
    assert text == (GOLDEN / name).read_text()


def test_changes_that_are_accepted_are_in_the_driver() -> None:
    job = a_job(flags=("--accept-change=seed", "--accept-change=data.shuffle"))
    assert '"accepted_changes": ["seed", "data.shuffle"],' in Ray().render(job).text


def test_the_command_by_hand_has_the_variables_and_the_file() -> None:
    target = Ray(address="http://head:8265", python="python")
    command = target.render(a_job(environment=(("TOKEN", "a b"),))).command
    assert " ".join(command) == (
        "ray job submit --no-wait --address http://head:8265 "
        """--runtime-env-json '{"env_vars": {"TOKEN": "a b"}}' """
        "-- python /shared/runs/digits/job.py"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--placement", "spred"], "--placement = spred: no such placement strategy; did you mean"),
        (["--cpus-per-worker", "0"], "--cpus-per-worker = 0: must be at least 1"),
        (["--resources", "fast"], "--resources = fast: not a resource and its amount"),
        (["--runtime-env", "no.yaml"], "--runtime-env = no.yaml: [Errno 2] No such file"),
        (["--time", "10"], "--time = 600 s: Ray has no time limit for a job"),
        (["--live"], "--live: an option of Drivetrain's supervisor"),
        (["--stall-timeout", "5"], "--stall-timeout = 5: an option of Drivetrain's supervisor"),
        (["--gpus-per-node", "4", "--nproc-per-node", "2"], "--nproc-per-node = 2: a Ray worker"),
        (["--nodes", "4:2"], "--nnodes = 4:2: the maximum is less than the minimum"),
    ],
)
def test_what_ray_would_refuse_is_said_before(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    request = read_request(["--on", "ray", *words, "train.py"])
    assert request is not None
    problems = [str(problem) for problem in request.target.problems(request.job)]
    assert len(problems) == 1
    assert problems[0].startswith(said)


def test_a_good_request_has_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    flags = ["--max-restarts=3", "--nodes=2", "--accept-change=seed"]
    request = read_request(["--on", "ray", *flags, "train.py"])
    assert request is not None
    assert request.target.problems(request.job) == []


@pytest.mark.slow
def test_nobody_there_is_said_with_the_address(tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install drivetrain[ray]")
    (tmp_path / "train.py").write_text("")
    command = ["train", "--on=ray", "--address=http://127.0.0.1:1", "--run-dir=run", "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain", *command],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": "http://127.0.0.1:2"},  # the flag wins over it
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == EnvironmentProblem.exit_code
    assert "--address = http://127.0.0.1:1: no Ray job server answers there" in done.stderr


@pytest.mark.parametrize(
    ("word", "code", "state"),
    [
        ("PENDING", None, State.WAITING),
        ("RUNNING", None, State.RUNNING),
        ("SUCCEEDED", 0, State.FINISHED),
        ("FAILED", 5, State.FAILED),
        ("FAILED", 75, State.STOPPED),
        ("STOPPED", None, State.STOPPED),
        ("A_NEW_WORD", None, State.UNKNOWN),
    ],
)
def test_ray_words_in_ours(word: str, code: int | None, state: State) -> None:
    assert status_of(word, code, "why\nmore").state is state


class Wrapped(Exception):
    """As Ray carries a worker's exception."""

    def __init__(self, inner: Exception) -> None:
        self._base_exc = inner


def the_end(errors: dict[int, Exception]) -> tuple[EndKind, int, int] | None:
    failures = [as_rank_failure(rank, error) for rank, error in errors.items()]
    end = end_of(failures, errors.values())
    return None if end is None else (end.kind, end.step, end.exit_code)


LOST_PEER = "RuntimeError: [gloo] Connection closed by peer [10.0.0.2]:4711"


def test_ends_are_read_as_the_supervisor_would() -> None:
    mistake = Wrapped(ScriptFailed("ConfigError: x", 2, 0, True))
    bug = Wrapped(ScriptFailed("ValueError: x", 1, 7, True))
    lost = Wrapped(ScriptFailed(LOST_PEER, 1, 6, True))
    gone = RuntimeError("The actor died")
    assert the_end({0: mistake, 1: mistake}) == (EndKind.START_UP, 0, 2)
    assert the_end({0: lost, 1: bug}) == (EndKind.FAILED, 7, 1)
    assert the_end({0: lost, 1: gone}) == (EndKind.FAILED, 6, 137)
    assert the_end({1: gone}) is None


def test_a_lost_peer_before_the_first_step_is_not_the_scripts_own_error() -> None:
    lost = Wrapped(ScriptFailed(LOST_PEER, 1, 0, True))
    failure = as_rank_failure(0, lost)
    end = end_of([failure], [lost])
    assert end is not None
    assert end.by_signal


def test_the_cause_is_told_in_full_and_last() -> None:
    errors = {
        0: Wrapped(ScriptFailed(LOST_PEER, 1, 6, True)),
        1: Wrapped(ScriptFailed("Oh", 1, 7, True)),
    }
    text = in_words([as_rank_failure(rank, error) for rank, error in errors.items()])
    assert text == (
        "rank 1 failed first: it failed with exit code 1\n(rank 0 stopped because of it)\n\nOh"
    )


def test_failures_survive_the_way_to_the_controller() -> None:
    copy = pickle.loads(pickle.dumps(ScriptFailed("text", 2, 3, True, 4)))  # noqa: S301
    assert (copy.text, copy.exit_code, copy.step, copy.trains, copy.pid) == ("text", 2, 3, True, 4)


def test_a_thread_can_be_asked_to_stop() -> None:
    request, other = StopRequest(), StopRequest()
    request.listen()
    try:
        ask_to_stop("drivetrain stop")
    finally:
        request.close()
    ask_to_stop("too late")
    assert request.received == "drivetrain stop"
    assert other.received is None


def test_the_desk_needs_neither_ray_nor_torch() -> None:
    code = (
        "import sys; from drivetrain.launch.request import read_request; "
        "r = read_request(['--on', 'ray', 'x.py']); r.target.render(r.job); "
        "sys.exit(any(name in sys.modules for name in ('ray', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class _Server:
    """A job server whose stream breaks off twice."""

    def __init__(self) -> None:
        self._streams = ["one\ntw", "one\ntwo\nth", "one\ntwo\nthree\n"]

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        for start in range(0, len(text := self._streams.pop(0)), 3):
            yield text[start : start + 3]

    def get_job_status(self, job_id: str) -> Any:
        return SimpleNamespace(is_terminal=lambda: not self._streams)

    def get_job_logs(self, job_id: str) -> str:
        return "one\ntwo\nthree\nlast words\n"


def test_a_stream_that_breaks_off_is_taken_up_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    server = _Server()
    monkeypatch.setattr(jobs, "connect", lambda address: server)  # noqa: ARG005
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # noqa: ARG005
    told = "".join(jobs.logs("http://head:8265", "raysubmit_1", follow=True))
    assert told == "one\ntwo\nthree\nlast words\n"
