"""Where each config value came from, and run.yaml, which records it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import yaml

from drivetrain.config.keys import flatten, leaf_keys, unflatten
from drivetrain.config.schema import RunConfig
from drivetrain.core.redaction import clean_address

SourceKind = Literal["default", "script", "file", "command line", "chosen"]


@dataclass(frozen=True)
class Source:
    """The source of a value; for a chosen value, also the reason."""

    kind: SourceKind
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


@dataclass(frozen=True)
class ResolvedConfig:
    """A validated config with the source of every value."""

    config: RunConfig
    sources: Mapping[str, Source] = field(default_factory=dict)
    left_to_script: tuple[str, ...] = ()
    """Command-line flags that do not belong to the config."""

    def source(self, path: str) -> Source:
        """Return where the value of a dotted key came from."""
        return self.sources.get(path, Source("default"))

    def choose(self, path: str, value: Any, why: str) -> ResolvedConfig:
        """Return a copy in which one value is chosen for the user, with the reason."""
        flat = flatten(self.config.model_dump(mode="json")) | {path: value}
        config = RunConfig.model_validate(unflatten(flat))
        return replace(self, config=config, sources={**self.sources, path: Source("chosen", why)})

    def to_yaml(self) -> str:
        """Return the text of run.yaml: `config` can be loaded again; `sources` explains it.

        Passwords in addresses are removed, because run.yaml is shown, copied and kept with the run.
        """
        values = flatten(self.config.model_dump(mode="json"))
        document = {
            "config": unflatten({key: _shown(value) for key, value in values.items()}),
            "sources": {path: clean_address(str(self.source(path))) for path in leaf_keys()},
        }
        return yaml.safe_dump(document, sort_keys=False, width=100, allow_unicode=True)


def _shown(value: Any) -> Any:
    if isinstance(value, str):
        return clean_address(value)
    return [_shown(each) for each in value] if isinstance(value, list) else value
