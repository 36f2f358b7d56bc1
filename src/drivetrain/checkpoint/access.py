"""May this run write its checkpoints there? A refusal is a mistake, and is not tried again."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from drivetrain.core.errors import EnvironmentProblem, Problem

_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR})
# By name: the stores' libraries need not be there. botocore's, google.auth's and azure's.
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
    """EnvironmentProblem for what would be refused again; other trouble stays as it is."""
    try:
        yield
    except Exception as error:
        if not _is_refusal(error):
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        remedy = "give a place you may write to, or the credentials for it"
        raise EnvironmentProblem(
            [Problem("checkpoint.directory", reason, remedy, address)]
        ) from error


def _is_refusal(error: Exception) -> bool:
    if isinstance(error, OSError) and (
        isinstance(error, PermissionError) or error.errno in _REFUSED
    ):
        return True
    return any(kind.__name__ in _NO_CREDENTIALS for kind in type(error).__mro__)
