"""Detect missing access to the checkpoint storage: a user error, which is not retried."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from drivetrain.core.errors import EnvironmentProblem, Problem

_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR})
# By name, because the libraries may not be installed: botocore's, google.auth's and azure's.
_NO_CREDENTIALS = frozenset(
    {
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialRetrievalError",
        "TokenRetrievalError",
        "UnauthorizedSSOTokenError",
        "ProfileNotFound",
        "DefaultCredentialsError",
        "RefreshError",
        "ClientAuthenticationError",
    }
)


@contextmanager
def refusals_named(address: str) -> Iterator[None]:
    """Raise EnvironmentProblem for errors that a retry cannot fix; let others through."""
    try:
        yield
    except Exception as error:
        if not _is_refusal(error):
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        remedy = "choose a place you can write to, or provide credentials for it"
        raise EnvironmentProblem(
            [Problem("checkpoint.directory", reason, remedy, address)]
        ) from error


def _is_refusal(error: Exception) -> bool:
    if isinstance(error, OSError) and (
        isinstance(error, PermissionError) or error.errno in _REFUSED
    ):
        return True
    return any(kind.__name__ in _NO_CREDENTIALS for kind in type(error).__mro__)
