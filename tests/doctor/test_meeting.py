"""Members meet in a folder: what is asked of one there is bounded by what it was told itself."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.doctor import channels as module
from drivetrain.doctor.agent import Agent
from drivetrain.doctor.channels import ChannelLimits, answer_in, meeting

LIMITS = ChannelLimits(ports=(29400,), places=("/nowhere/run",))


def _asked(folder: Path, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    for number, request in enumerate([*requests, {"call": "bye"}]):
        (folder / f"ask-{number}").write_text(json.dumps(request))
    answer_in(folder, 5.0, LIMITS)
    return [json.loads((folder / f"answer-{n}").read_text()) for n in range(len(requests))]


def test_who_writes_the_folder_cannot_have_a_member_delete_or_make_files(tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("a thesis\n")
    own = tmp_path / "own"
    own.mkdir()
    answers = _asked(
        own,
        {"call": "clear", "with": {"folder": str(tmp_path), "name": "precious.txt"}},
        {"call": "leave", "with": {"folder": str(tmp_path), "name": "planted"}},
        {"call": "clear", "with": {"folder": str(own), "name": "../precious.txt"}},
        {"call": "__init__", "with": {}},
        {"call": "facts", "with": {"ports": [], "places": [str(tmp_path / "elsewhere")]}},
        {"call": "listen", "with": {"ports": [8080]}},
        {"call": "sees", "with": {"folder": str(tmp_path), "name": "precious.txt"}},
        {"call": 5},
    )
    assert all("error" in answer for answer in answers), answers
    assert precious.read_text() == "a thesis\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own", "precious.txt"]


def test_what_a_meeting_needs_is_answered(tmp_path: Path) -> None:
    port, clock = _asked(
        tmp_path,
        {"call": "listen", "with": {"ports": [0]}},
        {"call": "clock", "with": {}},
    )
    assert port["answer"]["0"] > 0
    assert clock["answer"] > 0


@pytest.mark.parametrize("text", ["[]", "{", '{"call": "clock"}', "[" * 100_000])
def test_a_request_that_cannot_be_read_is_answered_as_such(tmp_path: Path, text: str) -> None:
    (tmp_path / "ask-0").write_text(text)
    (tmp_path / "ask-1").write_text('{"call": "bye"}')
    answer_in(tmp_path, 5.0, LIMITS)
    assert "error" in json.loads((tmp_path / "answer-0").read_text())


def test_an_agent_takes_away_only_what_it_left(tmp_path: Path) -> None:
    agent = Agent()
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(ValueError, match="not a name"):
        agent.leave(str(tmp_path), "../planted")
    with pytest.raises(ValueError, match="did not create"):
        agent.clear(str(tmp_path), "precious.txt")
    name = ".drivetrain-doctor-0123abcd"
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        agent.leave(str(tmp_path), name)
    (tmp_path / name).unlink()
    agent.leave(str(tmp_path), name)
    agent.clear(str(tmp_path), name)
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def _member(folder: Path, host: str, count: int) -> list[str] | None:
    """The hosts, as the one that asks sees them; None for those that answer."""
    with meeting(folder, count, LIMITS, {}, host) as channels:
        if channels is None:
            return None
        return [channel.name for channel in channels if float(channel.ask("clock")) > 0]


def _meet(folder: Path, hosts: list[str]) -> list[list[str] | None]:
    with ThreadPoolExecutor(len(hosts)) as pool:
        found: list[Future[list[str] | None]] = [
            pool.submit(_member, folder, host, len(hosts)) for host in hosts
        ]
        return [each.result() for each in found]


def test_members_meet_and_leave_nothing(tmp_path: Path) -> None:
    hosts = ["h2", "h1", "h3"]
    assert _meet(tmp_path, hosts) == [None, ["h1", "h2", "h3"], None]
    assert list(tmp_path.iterdir()) == []


def test_what_an_earlier_meeting_left_is_no_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_COME_WITHIN_S", 0.5)
    place = tmp_path / f"doctor-{os.getuid()}"
    place.mkdir(mode=0o700)
    for name in ("a-dead-host", "zz-dead-host", "zz-dead-host.0123456789abcdef"):
        (place / name).mkdir()
        (place / name / "seen").write_text(json.dumps(["h1", "h2"]))
        for number in range(40):
            (place / name / f"answer-{number}").write_text('{"answer": 0.0}')
    with pytest.raises(ConfigError, match=r"1 of 2 hosts arrived \(h1\)"):
        _member(tmp_path, "h1", 2)
    monkeypatch.setattr(module, "_COME_WITHIN_S", 20.0)
    assert _meet(tmp_path, ["h1", "h2"]) == [["h1", "h2"], None]


def test_a_place_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "meet").mkdir()
    (tmp_path / "meet" / f"doctor-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="--meet.*is not a directory that only you can write to"):
        _member(tmp_path / "meet", "h1", 2)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_place_that_others_can_write_is_refused(tmp_path: Path) -> None:
    place = tmp_path / f"doctor-{os.getuid()}"
    place.mkdir()
    place.chmod(0o777)
    with pytest.raises(ConfigError, match="is not a directory that only you can write to"):
        _member(tmp_path, "h1", 2)


@pytest.mark.parametrize("name", ["!evil", "..", "h2\n", "-rf", "h2.0123456789abcdefg"])
def test_only_names_of_hosts_count(tmp_path: Path, name: str) -> None:
    assert module.host_of(name) is None


def test_links_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member's folder that is a link to somewhere else is no member."""
    monkeypatch.setattr(module, "_COME_WITHIN_S", 1.0)
    place = tmp_path / f"doctor-{os.getuid()}"
    place.mkdir(mode=0o700)
    (tmp_path / "elsewhere").mkdir()
    (place / "h2.0123456789abcdef").symlink_to(tmp_path / "elsewhere")

    def echo() -> None:
        for _ in range(100):
            names = [p.name for p in place.iterdir() if re.match("h1", p.name)]
            (tmp_path / "elsewhere" / "seen").write_text(json.dumps(names))
            time.sleep(0.01)

    thread = threading.Thread(target=echo)
    thread.start()
    with pytest.raises(ConfigError, match="1 of 2 hosts arrived"):
        _member(tmp_path, "h1", 2)
    thread.join()
    assert [p.name for p in (tmp_path / "elsewhere").iterdir()] == ["seen"]
