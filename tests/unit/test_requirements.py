"""What to install for a missing library depends on how Drivetrain itself was installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain.core.errors import EnvironmentProblem
from drivetrain.core.requirements import command_for, require

FROM_AN_INDEX = "pip install 'drivetrain[plan]'"


@pytest.mark.parametrize(
    ("record", "command"),
    [
        (
            {"url": "file:///src/my%20checkout", "dir_info": {"editable": True}},
            "pip install -e '/src/my checkout[plan]'",
        ),
        ({"url": "file:///src/drivetrain", "dir_info": {}}, "pip install '/src/drivetrain[plan]'"),
        ({"url": "file:///dist/drivetrain-1-py3-none-any.whl", "archive_info": {}}, FROM_AN_INDEX),
    ],
)
def test_a_checkout_is_named_by_its_folder(record: dict[str, Any], command: str) -> None:
    assert command_for("plan", json.dumps(record)) == command


def test_an_installation_from_an_index_has_no_record() -> None:
    assert command_for("plan", None) == FROM_AN_INDEX


def test_an_error_names_the_folder_that_pip_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "drivetrain-1.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: drivetrain\nVersion: 1\n")
    (record / "direct_url.json").write_text('{"url": "file:///src/here", "dir_info": {}}')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvironmentProblem) as error:
        require("no_such_library", extra="plan")
    assert str(error.value) == (
        "no_such_library: this optional library is not installed; pip install '/src/here[plan]'"
    )
