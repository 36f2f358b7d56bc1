"""What a config names stays where it belongs, and listens where it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.config import load_config
from drivetrain.core.errors import ConfigError
from drivetrain.record import RunDirectory
from drivetrain.record.sinks import PrometheusSink

SMALL = {"global_batch_size": 8, "max_steps": 1}


@pytest.mark.parametrize("name", ["../../x", "/x", "a/../../b", "..", ".", "a\x1b[2J", "x" * 300])
def test_a_run_named_out_of_its_folder_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="name = .*: "):
        load_config(argv=[], defaults={**SMALL, "name": name})


@pytest.mark.parametrize("name", ["gpt", "gpt-2 (test)", "exp/1", "2024-01-05", "学習", "..x"])
def test_other_names_are_taken(name: str) -> None:
    assert load_config(argv=[], defaults={**SMALL, "name": name}).config.name == name


def test_metrics_are_for_this_machine_unless_said_otherwise(tmp_path: Path) -> None:
    assert load_config(argv=[], defaults=SMALL).config.record.prometheus.host == "127.0.0.1"
    sink = PrometheusSink(RunDirectory.at(tmp_path / "run"))
    try:
        assert sink._server.server_address[0] == "127.0.0.1"
        (note,) = (tmp_path / "prometheus").iterdir()
        assert f'"127.0.0.1:{sink._server.server_port}"' in note.read_text()
    finally:
        sink.close("finished")
