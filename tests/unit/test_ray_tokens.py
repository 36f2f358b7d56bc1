"""Ray clusters that ask for a token: where it is found, and that it is handed over."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain.core.errors import DrivetrainError, EnvironmentProblem
from drivetrain.launch.targets.ray import jobs
from drivetrain.launch.targets.ray.jobs import cluster_token
from drivetrain.testing.ray_cluster import cluster_environment

TOKEN = "0123456789abcdef" * 2


class Refused(Exception):
    """As Ray says it."""


class Client:
    """Remembers how it was made."""

    made: tuple[Any, ...] = ()
    mode: str | None = None
    answer: Exception | None = None

    def __init__(self, address: str | None, headers: dict[str, str] | None = None) -> None:
        type(self).made = (address, headers)
        if self.answer is not None:
            raise self.answer


@pytest.fixture(autouse=True)
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Client]:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that it is put back, whatever is done to it
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))

    class Fresh(Client):
        pass

    def require(module: str, *, extra: str) -> Any:
        Fresh.mode = os.environ.get("RAY_AUTH_MODE")
        names = {"JobSubmissionClient": Fresh, "AuthenticationError": Refused}
        return SimpleNamespace(**names)

    monkeypatch.setattr(jobs, "require", require)
    return Fresh


def test_it_is_looked_for_where_ray_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cluster_token() is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("of the home\n")
    assert cluster_token() == "of the home"
    (tmp_path / "file").write_text("of the file\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "file"))
    assert cluster_token() == "of the file"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of the variable")
    assert cluster_token() == "of the variable"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert cluster_token() is None


def test_a_token_that_is_there_is_handed_over(
    ray: type[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.connect("http://head:8265")
    assert ray.made[1] is None
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    jobs.connect("http://head:8265")
    assert ray.made == ("http://head:8265", {"Authorization": f"Bearer {TOKEN}"})
    # ray:// and HEAD:6379 go by the variable, which Ray reads when it is imported
    assert ray.mode == "token"


def test_a_cluster_that_asks_for_a_token_says_so_in_a_sentence(ray: type[Client]) -> None:
    ray.answer = Refused("Unauthorized: Missing authentication token\n\nThe cluster …")
    with pytest.raises(EnvironmentProblem, match=r"requires a token.*~/.ray/auth_token") as caught:
        jobs.connect("http://head:8265")
    assert "\n" not in str(caught.value)
    with (
        pytest.raises(DrivetrainError, match="requires a token"),
        jobs._told_plainly(),
    ):
        raise Refused("Unauthorized")


def test_a_test_cluster_has_nothing_of_the_users_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of the user")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "of the user")
    open_to_all = cluster_environment("10.0.0.1", tmp_path / "session")
    assert open_to_all["HOME"] == str(tmp_path / "session" / "home")
    assert open_to_all["RAY_AUTH_MODE"] == "disabled"
    assert "of the user" not in open_to_all.values()
    guarded = cluster_environment("10.0.0.1", tmp_path / "session", token=TOKEN)
    assert (guarded["RAY_AUTH_MODE"], guarded["RAY_AUTH_TOKEN"]) == ("token", TOKEN)
