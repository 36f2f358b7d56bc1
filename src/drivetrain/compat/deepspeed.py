"""DeepSpeedConfig: DeepSpeed's settings as keyword arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.core.bounded import NotAFile, read_text
from drivetrain.core.errors import ConfigError, DamagedRun, Problem


class DeepSpeedConfig(dict[str, Any]):
    """The contents of a DeepSpeed file: `DeepSpeedConfig(zero_optimization={"stage": 3})`.

    Can be used instead of a file: `PyTorchDDPTrainer(deepspeed_config=…)`,
    `parallel.deepspeed.config`. DeepSpeed's own class of this name takes only a file or a dict.

    Args:
        config: A JSON file or a mapping to start from.
        sections: DeepSpeed's keys; they override `config`.
    """

    def __init__(
        self, config: str | Path | Mapping[str, Any] | None = None, **sections: Any
    ) -> None:
        contents = config if isinstance(config, Mapping) else _read(config)
        super().__init__({**contents, **sections})


def _read(path: str | Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        contents = json.loads(read_text(Path(path)))
    except (OSError, ValueError, DamagedRun) as error:
        reason = error.rule if isinstance(error, NotAFile) else str(error).splitlines()[0]
        raise ConfigError([Problem("config", reason, "give a JSON file", str(path))]) from None
    if not isinstance(contents, dict):
        rule, remedy = "is not a JSON object", '{"zero_optimization": …}'
        raise ConfigError([Problem("config", rule, remedy, str(path))])
    return contents
