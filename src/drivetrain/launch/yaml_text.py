"""YAML that all parsers read in the same way, also those with other rules than PyYAML.

For kubectl, 1e-3 is a number and y is true; PyYAML treats both as strings and would not quote them.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

# What any YAML parser may take for a number or a time; a quantity such as 8Gi is none.
_LIKE_A_NUMBER = re.compile(r"[-+.]?[\d.][\d_.,:+\-eExXoObBa-fA-F]*")
_TRUTHS = ("y", "Y", "n", "N")


class _Dumper(yaml.SafeDumper):
    """A dumper without anchors: the same labels in two places are written twice."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    unclear = text in _TRUTHS or _LIKE_A_NUMBER.fullmatch(text) is not None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if unclear else None)


_Dumper.add_representer(str, _text)


def yaml_text(value: Any, *, width: int = 100) -> str:
    """Return the value as a YAML document, with keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=width, allow_unicode=True)
