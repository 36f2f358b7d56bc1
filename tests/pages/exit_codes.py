"""docs/exit-codes.md: the errors' codes and their docstrings, and what is not an error's."""

from __future__ import annotations

from collections.abc import Iterator

import drivetrain
from drivetrain.core import errors

_TOP = """# Exit codes

A program that starts `drivetrain` can tell from its exit code what to do next. A script under a
scheduler needs one line: **75 means start me again**. Written by `make pages` from the errors
themselves; the codes are [stable](stability.md).

| code | error | what it means |
| ---: | --- | --- |
| 0 | | done; for a check or a certificate: nothing found |
| 1 | `DrivetrainError`, or any other | the script's own error, or a check that found something |
"""
_REST = """| 77 | | a newer attempt of the same run has taken over; nothing more was written |
| 128 + N | | ended by signal N: 130 is Ctrl-C, 137 SIGKILL (often memory), 143 SIGTERM |

A training that Ctrl-C or SIGTERM stops saves first and leaves with 75; 130 and 143 are of commands
that had nothing to save.

In Python the same errors are exceptions; those with a link are in the
[API reference](reference.md#errors).

```bash
until drivetrain train --run-dir runs/mine --nproc-per-node 4 train.py; do
    [ $? -eq 75 ] || break      # anything but "saved, start me again" is for a person
    sleep 5                     # Ctrl-C also leaves with 75: a second one, here, ends the loop
done
```
"""


def page() -> str:
    rows = [f"| {code} | {_linked(kind)} | {_sentence(kind)} |" for code, kind in _coded()]
    return _TOP + "\n".join(rows) + "\n" + _REST


def _coded() -> list[tuple[int, type[Exception]]]:
    kinds = {kind.exit_code: kind for kind in _all_kinds() if kind.exit_code != 1}
    return sorted(kinds.items())


def _all_kinds() -> Iterator[type[errors.DrivetrainError]]:
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, errors.DrivetrainError):
            yield value


def _linked(kind: type[Exception]) -> str:
    name = kind.__name__
    if name not in drivetrain.__all__:
        return f"`{name}`"
    return f"[`{name}`](reference.md#{kind.__module__}.{name})"


def _sentence(kind: type[Exception]) -> str:
    return " ".join((kind.__doc__ or "").split())
