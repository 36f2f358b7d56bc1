"""Where each config value came from, and run.yaml, which records it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from drivetrain.config.keys import flatten, leaf_keys, unflatten
from drivetrain.config.schema import RunConfig
from drivetrain.core.redaction import clean_address

SourceKind = Literal["default", "script", "file", "command line", "chosen", "unused"]
"""unused: the run has no use for the key, because of something that the script brings itself."""

_WHERE = {"script": "in the script's config", "command line": "on the command line"}


@dataclass(frozen=True)
class Source:
    """The source of a value; for a chosen or unused value, also the reason."""

    kind: SourceKind
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind

    @property
    def is_users(self) -> bool:
        """True if the user set the value."""
        return self.kind in ("script", "file", "command line")

    @property
    def where(self) -> str:
        """Where the user set the value, for a sentence that continues "set"."""
        return _WHERE.get(self.kind, f"in {self.detail}")


class ConvertedConfig(dict[str, Any]):
    """Config values made from another library's settings, for `load_config(defaults=…)`."""

    def __init__(self, values: Mapping[str, Any], open_keys: Collection[str], library: str) -> None:
        super().__init__(values)
        self.sources = dict.fromkeys(open_keys, Source("default", library))
        """The sources of values that the user left at the library's default."""


def said_by_script(config: Mapping[str, Any]) -> dict[str, tuple[Any, Source]]:
    """Return the values of a script's mapping, by dotted key, with their sources."""
    known = config.sources if isinstance(config, ConvertedConfig) else {}
    return {key: (v, known.get(key, Source("script"))) for key, v in flatten(config).items()}


def said_by_file(
    values: Mapping[str, Any], file: Path, recorded: Mapping[str, Any]
) -> dict[str, tuple[Any, Source]]:
    """Return a file's values with their sources; `recorded` has the sources of a run.yaml.

    What a run.yaml records as a default was not set by the user, but the value still applies.
    """
    is_open = {key: str(recorded.get(key)).startswith(("default", "unused")) for key in values}
    default, given = Source("default", f"in {file}"), Source("file", str(file))
    return {key: (v, default if is_open[key] else given) for key, v in values.items()}


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

    def unused(self, path: str, why: str) -> ResolvedConfig:
        """Return a copy which records that a key has no effect in this run."""
        return replace(self, sources={**self.sources, path: Source("unused", why)})

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
