"""A node's attempt, and what is said of its end: each by itself, without a process."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain.checkpoint.lineage import claim_next
from drivetrain.checkpoint.manifest import Manifest
from drivetrain.checkpoint.storage import storage_at
from drivetrain.diagnose.finding import Finding, Severity
from drivetrain.diagnose.finding import Kind as Diagnosis
from drivetrain.record import session
from drivetrain.record.run_directory import RunDirectory
from drivetrain.record.session import (
    RUN_DIR,
    SESSION,
    TRAINS,
    Phase,
    ProgressPage,
    beginnings,
    forget_attempt,
    mark_training,
    page_path,
    remember_attempt,
)
from drivetrain.supervise import attempt as attempt_module
from drivetrain.supervise.attempt import NodeAttempt
from drivetrain.supervise.failures import reporting
from drivetrain.supervise.failures.attempt_report import (
    AttemptReport,
    last_saved_step,
    write_closed,
    write_end,
    write_lost,
)
from drivetrain.supervise.failures.failure import RankFailure
from drivetrain.supervise.failures.rank_dump import RankDump
from drivetrain.supervise.failures.reporting import (
    kept,
    lost_replica,
    paragraph,
    say,
    stopped,
    with_verdict,
    write_down,
)
from drivetrain.supervise.policy import End, EndKind
from drivetrain.supervise.stall import Patience

OWN = 'Traceback …\n  File "/home/ada/train.py", line 3, in loss\nValueError: no such token'
PEER_GONE = "Traceback …\nRuntimeError: [..] Connection closed by peer [127.0.0.1]:4321"


class Node:
    """Two processes of a node, as its supervisor sees them."""

    def __init__(self, codes: dict[int, int] | None = None) -> None:
        self.workers = [SimpleNamespace(local_rank=n, pid=100 + n) for n in range(2)]
        self.codes = [codes or {}]
        self.command = ["train.py"]
        self.left = {0: RankDump("left by 0", "")}
        self.told = {1: RankDump("told by 1", "")}

    def exit_codes(self) -> dict[int, int]:
        return self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]

    def left_behind(self) -> dict[int, RankDump]:
        return dict(self.left)

    def collect_dumps(self) -> dict[int, RankDump]:
        return dict(self.told)


def node_attempt(session: Path, node: Node | None = None, *, nodes: int | None = 1) -> NodeAttempt:
    """The second of two nodes' ranks are 4 and 5 of the run."""
    group: Any = SimpleNamespace(
        group_world_size=nodes,
        workers=[SimpleNamespace(global_rank=4), SimpleNamespace(global_rank=5)],
        spec=SimpleNamespace(rdzv_handler=SimpleNamespace()),
    )
    given: Any = node or Node()
    return NodeAttempt(3, given, group, session)


def say_error(attempt: NodeAttempt, local_rank: int, **extra: Any) -> None:
    path = attempt.error_file(local_rank)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"message": {"extraInfo": extra}}))


def test_a_round_is_the_rendezvous_number_and_else_the_starts_before_this_one(
    tmp_path: Path,
) -> None:
    attempt = node_attempt(tmp_path)
    assert attempt.round == 2
    handler: Any = attempt.group.spec.rdzv_handler
    handler.round = "7"
    assert attempt.round == 7


@pytest.mark.parametrize(("nodes", "has_peers"), [(None, False), (1, False), (2, True)])
def test_other_nodes_are_peers(tmp_path: Path, nodes: int | None, has_peers: bool) -> None:
    assert node_attempt(tmp_path, nodes=nodes).has_peers is has_peers


def test_a_script_trains_once_it_has_said_so(tmp_path: Path) -> None:
    attempt = node_attempt(tmp_path)
    assert attempt.trains is False
    (tmp_path / TRAINS).touch()
    assert attempt.trains is True


def test_the_last_step_is_that_of_the_rank_that_is_furthest(tmp_path: Path) -> None:
    attempt = node_attempt(tmp_path)
    assert attempt.pages() == [None, None]
    ProgressPage(page_path(tmp_path, 1)).note(Phase.STEPPING, 6)
    first, second = attempt.pages()
    assert first is None
    assert second is not None
    assert (second.step, second.pid) == (6, os.getpid())
    assert attempt.step() == 6


def test_ranks_have_the_runs_numbers_and_leave_errors_under_the_nodes(tmp_path: Path) -> None:
    attempt = node_attempt(tmp_path)
    assert [attempt.global_rank(local) for local in range(2)] == [4, 5]
    assert attempt.error_file(1) == tmp_path / "errors" / "3-1.json"


def test_only_ranks_that_live_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = node_attempt(tmp_path)
    looked: list[Any] = []
    watch: Any = SimpleNamespace(look=lambda living, now_s: looked.append((living, now_s)))
    attempt._resources = watch
    attempt.look_at_resources({0: 1})
    ((living, now_s),) = looked
    assert living == [(1, 101)]
    assert abs(now_s - time.monotonic()) < 60

    seen: list[Any] = []

    def observe(used_s: dict[int, float], now_s: float) -> float:
        seen.append((used_s, now_s))
        return 9.0

    idle: Any = SimpleNamespace(observe=observe)
    attempt._idle = idle
    monkeypatch.setattr(attempt_module, "processor_s", {100: 1.5, 101: None}.get)
    assert attempt.idle_s({}) == 9.0
    assert attempt.idle_s({0: 1}) == 9.0
    assert [used for used, _ in seen] == [{100: 1.5}, {}], "one that cannot be read is left out"
    assert abs(seen[0][1] - time.monotonic()) < 60


def test_ranks_that_wait_for_each_other_are_told_by_their_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def judged(stacks: Any, idle_s: float, patience: Patience, *, has_peers: bool) -> bool:
        asked.append((stacks, idle_s, patience, has_peers))
        return True

    monkeypatch.setattr(attempt_module, "is_deadlock", judged)
    monkeypatch.setattr(attempt_module, "parse_stacks", str.upper)
    patience = Patience(1.0)
    assert node_attempt(tmp_path).waits_for_itself(12.0, patience) is True
    assert asked == [({4: "LEFT BY 0", 5: "TOLD BY 1"}, 12.0, patience, False)]


def test_what_ranks_have_left_is_known_without_asking(tmp_path: Path) -> None:
    attempt = node_attempt(tmp_path)
    assert attempt.collect_dumps(asking=False) == {4: RankDump("left by 0", "")}
    assert set(attempt.collect_dumps(asking=True)) == {4, 5}


def test_a_rank_that_ended_well_has_not_failed(tmp_path: Path) -> None:
    attempt = node_attempt(tmp_path)
    say_error(attempt, 1, py_callstack=OWN, at_s=12.5)
    assert attempt.failures({0: 0, 1: 1}) == [RankFailure(5, 101, 1, OWN, 12.5)]


def test_a_rank_that_said_nothing_failed_about_now(tmp_path: Path) -> None:
    attempt = node_attempt(tmp_path)
    before_s = time.time()
    for content in (None, "no JSON"):
        if content is not None:
            (tmp_path / "errors").mkdir()
            attempt.error_file(0).write_text(content)
        (failure,) = attempt.failures({0: -9})
        assert (failure.rank, failure.pid, failure.exit_code, failure.error) == (4, 100, -9, "")
        assert before_s <= failure.at_s <= time.time()


def test_others_get_a_moment_to_say_why(tmp_path: Path) -> None:
    """Rank 0 has only noticed; rank 1, the cause, ends a little later."""
    node = Node()
    node.codes = [{0: 1}, {0: 1}, {0: 1, 1: 3}]
    attempt = node_attempt(tmp_path, node)
    say_error(attempt, 0, py_callstack=PEER_GONE, at_s=1.0)
    assert attempt.wait_for_the_cause({0: 1}) == {0: 1, 1: 3}


@pytest.mark.parametrize(("nodes", "waits"), [(1, True), (2, False)])
def test_one_who_only_noticed_is_waited_for_longer_where_the_cause_must_be_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, waits: bool
) -> None:
    attempt = node_attempt(tmp_path, Node({0: 1}), nodes=nodes)
    say_error(attempt, 0, py_callstack=PEER_GONE, at_s=1.0)
    waited: list[float] = []

    def wait(codes: Any, patience_s: float) -> Any:
        waited.append(patience_s)
        return codes

    monkeypatch.setattr(attempt, "_wait_for_more", wait)
    attempt.wait_for_the_cause({0: 1})
    assert waited == ([0.1, 2.0] if waits else [0.1])


def test_nobody_is_waited_for_once_all_have_ended(tmp_path: Path) -> None:
    node = Node({0: 1})
    attempt = node_attempt(tmp_path, node)
    began_s = time.monotonic()
    assert attempt._wait_for_more({0: 1, 1: 1}, 60.0) == {0: 1, 1: 1}
    assert attempt._wait_for_more({0: 1}, 0.03) == {0: 1}
    assert 0.03 <= time.monotonic() - began_s < 30


@pytest.mark.parametrize(("nodes", "kind"), [(1, EndKind.FAILED), (2, EndKind.PEER)])
def test_an_end_is_classified_by_what_ranks_wrote_and_who_is_there(
    tmp_path: Path, nodes: int, kind: EndKind
) -> None:
    attempt = node_attempt(tmp_path, nodes=nodes)
    (tmp_path / TRAINS).touch()
    ProgressPage(page_path(tmp_path, 0)).note(Phase.STEPPING, 8)
    end = attempt.classify([RankFailure(4, 100, 1, PEER_GONE)])
    assert (end.kind, end.step, end.trains) == (kind, 8, True)
    (tmp_path / TRAINS).unlink()
    assert attempt.classify([RankFailure(4, 100, 1, OWN)]).trains is False


@pytest.mark.parametrize(
    ("code", "text", "trains"),
    [
        (-9, "from drivetrain import Trainer\n", True),
        (-9, "import torch\n", False),
        (-11, "from drivetrain import Trainer\n", False),
        (1, "from drivetrain import Trainer\n", False),
    ],
)
def test_a_rank_killed_before_it_could_say_so_trains_if_its_script_imports_drivetrain(
    tmp_path: Path, code: int, text: str, trains: bool
) -> None:
    (tmp_path / "train.py").write_text(text)
    node = Node()
    node.command = [str(tmp_path / "train.py")]
    end = node_attempt(tmp_path, node).classify([RankFailure(4, 100, code)])
    assert (end.kind, end.trains) == (EndKind.START_UP, trains)


def test_an_account_has_all_that_is_known(tmp_path: Path) -> None:
    attempt = node_attempt(tmp_path, Node({1: 3}))
    watch: Any = SimpleNamespace(facts=lambda: {0: {"held_bytes": 7}})
    attempt._resources = watch
    (tmp_path / "run-0").write_text(str(tmp_path / "run"))
    (tmp_path / "attempt").write_text("2")
    (tmp_path / TRAINS).touch()
    end, failures = End(EndKind.FAILED, 5), [RankFailure(5, 101, 3, OWN)]
    account = attempt.account(end, failures, "some detail", why="too often", restarts=True)
    assert account == AttemptReport(
        end,
        failures,
        os.uname().nodename,
        "some detail",
        "too often",
        restarts=True,
        exits={5: 3},
        ranks=(4, 5),
        resources={4: {"held_bytes": 7}},
        whole=account.whole,
    )
    assert account.whole is not None
    assert account.whole.name == "00005.txt"
    assert attempt.account(end, [], why="", restarts=False).detail == ""


def test_a_run_without_a_checkpoint_is_known_to_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = storage_at(tmp_path / "run" / "checkpoints")
    assert last_saved_step(tmp_path) is None, "no rank has named a run"
    (tmp_path / "run-0").write_text(str(tmp_path / "run"))
    (tmp_path / "attempt").write_text("1")
    assert last_saved_step(tmp_path) is None, "without a claim here, it may save elsewhere"
    claim_next(storage, 0)
    storage.put("step-000000004-a1/data", b"begun, not committed")
    assert last_saved_step(tmp_path) == 0
    attempt, end = node_attempt(tmp_path), End(EndKind.FAILED, 5)
    assert attempt.account(end, [], why="", restarts=True).is_unsaved
    storage.put("step-000000004-a1/manifest.json", b"{}")
    assert last_saved_step(tmp_path) is None, "it is damaged"
    complete = Manifest(4, 1, {"tp": 1}, "ddp", {})
    storage.put("step-000000004-a1/manifest.json", complete.to_json())
    assert last_saved_step(tmp_path) == 4
    (tmp_path / "run-0").unlink()
    monkeypatch.setenv(RUN_DIR, str(tmp_path / "run"))
    assert last_saved_step(tmp_path) == 4, "an earlier command's, while the ranks still import"


@pytest.mark.parametrize("is_named", [False, True])
def test_a_start_that_was_killed_before_the_run_was_claimed_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    monkeypatch.setenv(SESSION, str(tmp_path))
    if is_named:
        monkeypatch.setenv(RUN_DIR, str(tmp_path / "run"))  # it does not exist yet
    mark_training()
    assert last_saved_step(tmp_path) is None, "it may save elsewhere"
    mark_training(keeps_all=True)
    assert last_saved_step(tmp_path) == 0
    account = node_attempt(tmp_path).account(End(EndKind.FAILED, 0), [], why="", restarts=True)
    assert "restarting from the beginning, as there is no checkpoint yet" in paragraph(account)


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_run_that_resumed_from_another_or_cannot_be_read_is_not_said_to_begin_anew(
    tmp_path: Path, is_readable: bool
) -> None:
    storage = storage_at(tmp_path / "run" / "checkpoints")
    (tmp_path / "run-0").write_text(str(tmp_path / "run"))
    (tmp_path / "attempt").write_text("1")
    claim_next(storage, 40)
    if not is_readable:
        storage.put("attempt-00001.json", b"[]")
    assert last_saved_step(tmp_path) is None


def test_a_start_that_opened_no_attempt_is_in_the_facts_of_the_next_one_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SESSION, str(tmp_path))
    monkeypatch.setattr(session, "_opened", 0)  # other tests of this process have opened runs
    killed = RankFailure(1, 3, -9, "", 0.0)
    write_end(
        tmp_path,
        AttemptReport(End(EndKind.FAILED, 0), [killed], "h", "", "", restarts=True),
        {},
    )
    write_end(tmp_path, AttemptReport(End(EndKind.RESIZED, 0), (), "h", "", "", restarts=True), {})
    assert beginnings()["lost_starts"] == ["rank 1 was killed by SIGKILL"]
    remember_attempt(1)
    assert "lost_starts" not in beginnings()


def test_an_end_is_recorded_for_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    run = RunDirectory.at(tmp_path / "run")
    write_lost(tmp_path, "SIGKILL", restarts=True)  # no rank has opened an attempt
    run.begin_attempt(1, {"launched_s": 5.0})
    (tmp_path / "run-0").write_text(str(run.path))
    (tmp_path / "attempt").write_text("1")
    ProgressPage(page_path(tmp_path, 0)).note(Phase.STEPPING, 3)
    ProgressPage(page_path(tmp_path, 1)).note(Phase.STEPPING, 4)
    write_lost(tmp_path, "SIGKILL", restarts=False)
    end = run.attempts()[0].end
    assert (end["kind"], end["step"], end["restarts"]) == ("failed", 4, False)
    assert end["detail"] == "the supervisor was killed by SIGKILL after step 4"
    write_lost(tmp_path, "SIGBUS", restarts=False)
    assert run.attempts()[0].end == end, "what the supervisor recorded itself stays"


# What is said of an end


def report(
    kind: EndKind, *failures: RankFailure, step: int = 4, trains: bool = True, **more: Any
) -> AttemptReport:
    given = {"detail": "rank 1 stands still", "why": "", **more}
    return AttemptReport(End(kind, step, trains=trains), failures, "node7", **given)


def said(account: AttemptReport) -> str:
    """Without the time of day."""
    text = paragraph(account)
    assert re.match(r"\[\d\d:\d\d:\d\d\] ", text)
    return text.partition("] ")[2]


@pytest.mark.parametrize(
    ("account", "text"),
    [
        (
            report(EndKind.STALLED, restarts=True),
            "node7: rank 1 stands still; the ranks' stacks were saved; restarting from the "
            "newest checkpoint",
        ),
        (report(EndKind.STALLED, trains=False), "node7: rank 1 stands still; stopping"),
        (
            report(EndKind.PREEMPTED, why="asked by the scheduler"),
            "the ranks were asked to stop and saved after step 4; stopping (asked by the "
            "scheduler)",
        ),
        (
            report(EndKind.RESIZED, restarts=True),
            "nodes joined or left after step 4; restarting from the newest checkpoint",
        ),
        (
            report(EndKind.PEER, restarts=True),
            "node7: a rank on another node ended after step 4; restarting from the newest "
            "checkpoint",
        ),
        (report(EndKind.STALE), "another attempt has taken over the run; stopping"),
        (
            report(EndKind.FAILED, RankFailure(5, 101, -9), restarts=True, why="failure 1 of 3"),
            "rank 5 (pid 101, node7) was killed by SIGKILL after step 4; restarting from the "
            "newest checkpoint (failure 1 of 3)",
        ),
        (
            report(EndKind.FAILED, RankFailure(5, 101, 1, OWN), restarts=True),
            "rank 5 (pid 101, node7) failed with exit code 1 after step 4: ValueError: no such "
            "token; restarting from the newest checkpoint",
        ),
        (
            report(EndKind.FAILED, RankFailure(5, 101, -9), restarts=True, is_unsaved=True),
            "rank 5 (pid 101, node7) was killed by SIGKILL after step 4; restarting from the "
            "beginning, as there is no checkpoint yet",
        ),
        (
            report(
                EndKind.START_UP, RankFailure(5, 101, -9), step=0, restarts=True, has_begun=False
            ),
            "rank 5 (pid 101, node7) was killed by SIGKILL before its first step; restarting",
        ),
        (report(EndKind.FAILED), "node7: rank 1 stands still after step 4; stopping"),
        (report(EndKind.FINISHED, detail=""), "node7: ended after step 4; stopping"),
    ],
)
def test_every_end_is_said_in_one_line(account: AttemptReport, text: str) -> None:
    assert said(account) == text


def test_a_kill_is_explained_by_whether_its_run_was_open(tmp_path: Path) -> None:
    failure = RankFailure(5, 101, -9)
    assert "or the kernel did" in paragraph(report(EndKind.START_UP, failure, step=0))
    opened = report(EndKind.START_UP, failure, step=0, whole=tmp_path / "00005.txt")
    assert "use a smaller micro_batch_size" in paragraph(opened)
    assert "use a smaller micro_batch_size" in paragraph(report(EndKind.FAILED, failure))


def test_an_attempt_is_not_overwritten_by_ranks_that_did_not_open_another(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    (tmp_path / "run-0").write_text(str(run.path))
    (tmp_path / "attempt").write_text("1")
    first = report(EndKind.FAILED, RankFailure(5, 101, 1, OWN), restarts=True, detail="")
    assert write_end(tmp_path, first, {}) == (run.path, 1)
    kept = run.attempts()[0].end
    forget_attempt(tmp_path)
    forget_attempt(tmp_path)
    killed = RankFailure(4, 100, -9)
    assert write_end(tmp_path, report(EndKind.START_UP, killed, restarts=True), {}) is None
    assert run.attempts()[0].end == kept
    last = report(EndKind.START_UP, killed, why="enough")
    assert write_end(tmp_path, last, {}) is None
    why = "the next attempt ended before it had begun: rank 4 was killed by SIGKILL; enough"
    assert run.attempts()[0].end == {**kept, "restarts": False, "why": why}
    write_closed(tmp_path, 137)
    assert (run.attempt(1) / "closed.json").exists()


def test_of_a_run_that_stops_for_a_failure_the_cause_comes_last() -> None:
    failure = RankFailure(5, 101, -9)
    with_reason = paragraph(report(EndKind.FAILED, failure, why="3 failures at step 4"))
    without = paragraph(report(EndKind.FAILED, failure))
    assert with_reason == f"\nnot restarted: 3 failures at step 4{without}"
    assert without.startswith("\nrank 5 (pid 101, node7) failed first: killed by SIGKILL")


@pytest.mark.parametrize(
    ("who", "remedy"),
    [
        (
            "Rows.__getitem__(3)",
            "fix it, or leave that sample out of the dataset",
        ),
        (
            "Rows.__getitems__([3, 4])",
            "fix it, or leave that sample out of the dataset",
        ),
        (
            "pad (collate), given 4 samples,",
            "make the samples compatible, or pass a DataLoader with a collate_fn that combines "
            "them",
        ),
        ("the hook Upload.on_log", "fix it"),
    ],
)
def test_a_mistake_in_the_users_code_has_its_remedy(who: str, remedy: str) -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "/home/ada/train.py", line 3, in loss\n'
        f"ValueError: no such token\nraised by {who}"
    )
    whole = paragraph(report(EndKind.FAILED, RankFailure(0, 1, 1, text)))
    assert whole.endswith(
        f"\n\n{who} raised this after step 4, at train.py:3 in loss: {remedy}; run the same "
        "command again"
    )


def test_a_mistake_nobody_is_named_for_is_in_your_code() -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "/home/ada/train.py", line 3, in <module>\n'
        "ValueError: no such token\n"
    )
    whole = paragraph(report(EndKind.FAILED, RankFailure(0, 1, 1, text)))
    assert "\n\nyour code raised this after step 4, at train.py:3 in <module>: fix it" in whole


def test_a_replica_that_is_lost_is_named() -> None:
    text = lost_replica(End(EndKind.FAILED, 4), RankFailure(2, 77, -9), "node7")
    assert re.fullmatch(
        r"\[\d\d:\d\d:\d\d\] replica 2 \(pid 77, node7\) was killed by SIGKILL after step 4; "
        "the others continue, and it is restarted",
        text,
    )


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            EndKind.PREEMPTED,
            "stopped by SIGTERM and saved after step 4; to resume, run the same command again with "
            "--run-dir /runs/a before the script",
        ),
        (EndKind.FINISHED, "SIGTERM arrived as the last step ended; the run is finished"),
        (
            EndKind.FAILED,
            "stopped by SIGTERM after step 4; the newest checkpoint is of step 3: to resume, run "
            "the same command again with --run-dir /runs/a before the script",
        ),
    ],
)
def test_who_was_asked_to_stop_says_what_became_of_it(kind: EndKind, text: str) -> None:
    saved_step = 4 if kind is EndKind.PREEMPTED else 3
    assert stopped(End(kind, 4), "SIGTERM", saved_step, Path("/runs/a")) == text


def test_a_stop_without_a_save_does_not_claim_one() -> None:
    said = stopped(End(EndKind.PREEMPTED, 4), "SIGINT", 0, Path("/runs/a"))
    assert said == f"stopped by SIGINT after step 4; {kept(0, None)}"


def test_what_is_left_of_a_run_that_could_not_save() -> None:
    assert kept(0, Path("/runs/a")) == (
        "there is no checkpoint yet: run the same command again to start from the beginning"
    )
    assert kept(None, None) == "run the same command again to resume"


def test_with_a_directory_the_same_command_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_DIR, "/runs/a")
    said = stopped(End(EndKind.PREEMPTED, 4), "SIGTERM", None, Path("/runs/a"))
    assert said.endswith("saved after step 4; run the same command again to resume")


def finding(kind: Diagnosis) -> Finding:
    return Finding(
        next(iter(Severity)), kind, "rank 1 waits", "look at rank 0", evidence=("a line", "another")
    )


def test_a_verdict_stands_below_what_happened_with_its_grounds_where_they_are_nowhere_else() -> (
    None
):
    other = next(kind for kind in Diagnosis if kind is not Diagnosis.CRASH)
    assert with_verdict("it ended", None) == "it ended"
    assert with_verdict("it ended", finding(Diagnosis.CRASH)) == "it ended"
    short = "it ended\n  rank 1 waits\n  → look at rank 0"
    assert with_verdict("it ended", finding(other)) == short
    assert with_verdict("it ended", finding(other), is_written_down=False) == (
        f"{short}\n    · a line\n    · another"
    )


def test_a_remedy_that_the_error_gave_is_not_given_again() -> None:
    found = finding(Diagnosis.NON_FINITE)
    error = "NonFiniteLoss: train/loss = nan; look at rank 0"
    assert with_verdict(error, found) == error
    assert with_verdict(error, replace(found, line="train.py:3")) == f"{error}\n  rank 1 waits"


def test_what_is_said_goes_to_stderr_a_line_at_a_time(capfd: pytest.CaptureFixture[str]) -> None:
    say("two")
    assert capfd.readouterr() == ("", "two\n")


def test_an_end_is_written_down_and_explained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    account, dumps = report(EndKind.STALLED), {1: RankDump("stack", "")}
    found = finding(Diagnosis.CRASH)
    monkeypatch.setattr(
        reporting,
        "write_end",
        lambda *given: (tmp_path, 2) if given == (tmp_path, account, dumps) else None,
    )
    monkeypatch.setattr(
        reporting, "explain_attempt", lambda *given: found if given == (tmp_path, 2) else None
    )
    assert write_down(tmp_path, account, dumps) is found

    def breaks(*_: Any) -> None:
        raise KeyError("rank")

    monkeypatch.setattr(reporting, "explain_attempt", breaks)
    assert write_down(tmp_path, account, dumps) is None
    assert capfd.readouterr().err == "no verdict: KeyError: 'rank'\n"


def test_a_script_without_a_run_directory_is_judged_by_what_ranks_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[Any] = []
    monkeypatch.setattr(reporting, "judge_attempt", judged.append)
    monkeypatch.setattr(reporting, "parse_stacks", str.upper)
    monkeypatch.setattr(reporting, "calls_of", lambda text: ["call"] if text else None)
    dumps = {4: RankDump("in send", "{}"), 5: RankDump("in recv", "")}
    assert write_down(tmp_path, report(EndKind.FAILED), dumps) is None
    assert judged == [], "only a stall and a kill have something to be judged by"
    account = report(EndKind.STALLED, ranks=(4, 5))
    write_down(tmp_path, account, dumps)
    (evidence,) = judged
    assert evidence.attempt == 1
    assert evidence.stacks == {4: "IN SEND", 5: "IN RECV"}
    assert evidence.calls == {4: ["call"]}
    assert evidence.end["hosts"] == {"4": "node7", "5": "node7"}, "as it is read back from JSON"
    assert evidence.end["kind"] == "stalled"
    killed = AttemptReport(End(EndKind.START_UP, 0, by_signal=True), [], "node7", "", "")
    write_down(tmp_path, killed, {})
    assert judged[1].end["kind"] == "failed while starting"
