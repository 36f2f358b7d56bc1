"""An old name works until its time is over, and says what to write instead."""

from __future__ import annotations

import pytest

import drivetrain
from drivetrain import ConfigError, load_config
from drivetrain.core.deprecation import CONFIG_KEYS, PUBLIC_NAMES, Renamed


@pytest.fixture
def batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIG_KEYS, "batch_size", Renamed("global_batch_size", "0.4"))


@pytest.mark.usefixtures("batch_size")
def test_an_old_key_of_the_config() -> None:
    with pytest.warns(
        FutureWarning, match=r"batch_size is now global_batch_size; 0\.4 removes the old name"
    ):
        resolved = load_config(argv=["batch_size=8", "max_steps=1"])
    assert resolved.config.global_batch_size == 8
    assert resolved.source("global_batch_size").kind == "command line"


@pytest.mark.usefixtures("batch_size")
def test_both_names_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="is the old name of global_batch_size"):
        load_config(argv=["batch_size=8", "global_batch_size=8", "max_steps=1"])


def test_an_old_public_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PUBLIC_NAMES, "Callback", Renamed("Hook", "0.4"))
    with pytest.warns(FutureWarning, match=r"drivetrain\.Callback is now Hook"):
        found = drivetrain.Callback
    assert found is drivetrain.Hook


def test_what_is_renamed_is_not_also_in_use() -> None:
    assert not PUBLIC_NAMES.keys() & set(drivetrain.__all__)
    assert {renamed.new for renamed in PUBLIC_NAMES.values()} <= set(drivetrain.__all__)
