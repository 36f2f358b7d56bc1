"""The token of a Ray cluster that asks for one, found where Ray itself looks for it.

A new head asks for a token as soon as there is one; whoever comes later has to say that it has one
(`RAY_AUTH_MODE=token`), or is refused. Nobody should have to say what can be seen.
"""

from __future__ import annotations

import os
from pathlib import Path

MODE = "RAY_AUTH_MODE"
VARIABLE, PATH_VARIABLE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_REMEDY = (
    "copy the head's token (`ray get-auth-token` there) to ~/.ray/auth_token,"
    " or name its file in RAY_AUTH_TOKEN_PATH"
)


def token() -> str | None:
    """Of this user; None when there is none, or it is not to be used."""
    if os.environ.get(MODE, "token").lower() != "token":
        return None
    if given := os.environ.get(VARIABLE):
        return given
    path = os.environ.get(PATH_VARIABLE) or Path.home() / ".ray" / "auth_token"
    try:
        return Path(path).read_text().strip() or None
    except OSError:
        return None


def headers() -> dict[str, str] | None:
    """For the job server. Ray's other ways in go by the mode, which it reads when imported."""
    found = token()
    if found is None:
        return None
    os.environ.setdefault(MODE, "token")
    return {"Authorization": f"Bearer {found}"}


def in_words(reason: str) -> tuple[str, str]:
    """What Ray says of a token that is missing or wrong: the rule, and what to do."""
    lines = reason.strip().splitlines()
    return f"the cluster asks for a token ({lines[0] if lines else 'refused'})", _REMEDY
