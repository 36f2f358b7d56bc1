"""How the trial of `communication.compression: auto` ends: into run.yaml, and said."""

from __future__ import annotations

from collections.abc import Callable

from drivetrain.parallel.communication.auto import Trial
from drivetrain.train.assemble import Assembly
from drivetrain.train.saving.config_record import ConfigRecord
from drivetrain.train.saving.own_states import own_states


def announce_compression(
    assembly: Assembly, config: ConfigRecord, say: Callable[[str], None]
) -> None:
    """Now, when an earlier attempt has settled it; else when the trial does."""
    trial = own_states(assembly.engine).get("communication")
    if not isinstance(trial, Trial) or not assembly.world.is_main:
        return

    def settled(name: str, why: str) -> None:
        config.choose("communication.compression", name, why)
        say(f"communication: {'plain gradients' if name == 'none' else name}; {why}")

    trial.when_settled = settled
    if trial.choice:
        settled(trial.choice, "as in this run's earlier attempt")
