"""Which addresses are followed that a person did not type but a file names.

fsspec knows dozens of protocols; some run code that lies at the address, some wrap others (`a::b`),
some are made to reach into this machine. A file that somebody else wrote may only name a path or
an object store.
"""

from __future__ import annotations

from typing import Any

from drivetrain.core.errors import ConfigError, Problem

FOLLOWED = ("file", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az")


def followed(where: str, address: Any) -> str:
    """The address, when it may be followed; ConfigError otherwise. `where` names the file's key."""
    if not isinstance(address, str):
        raise ConfigError([Problem(where, "not an address", "mend the file", address)])
    protocol, separator, _ = address.partition("://")
    is_path = not separator and "::" not in address
    if is_path or (protocol in FOLLOWED and "::" not in address):
        return address
    rule = f"a run's directory is only followed to a path or to {', '.join(FOLLOWED)}"
    remedy = "if you trust it, give the address yourself in place of the run's directory"
    raise ConfigError([Problem(where, rule, remedy, address)])
