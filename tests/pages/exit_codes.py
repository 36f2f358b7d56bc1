"""docs/exit-codes.md: exit codes of the errors, with their docstrings, and all other codes."""

from __future__ import annotations

from collections.abc import Iterator

import drivetrain
from drivetrain.core import errors

_TOP = """# Exit codes

The exit code tells a program that starts `drivetrain` what to do next. For a script under a
scheduler, one rule is enough: **75 means start me again**. The codes are [stable](stability.md).
`make pages` generates this page from the error classes.

| code | error | meaning |
| ---: | --- | --- |
| 0 | | success; for a check or a certificate: no problem found |
| 1 | `DrivetrainError`, or any other | the script's own error, or a check that found a problem |
"""
_REST = """| 77 | | a newer attempt of the same run has taken over; this one wrote nothing more |
| 128 + N | | ended by signal N: 130 is Ctrl-C, 137 SIGKILL (often out of memory), 143 SIGTERM |

`drivetrain train` exits with the code of the rank that failed first, also if the script chose it:
after `sys.exit(7)` it is 7. [Launching](launching.md#exit-codes) shows this, and where 5 is used.

A training run that is stopped by Ctrl-C or SIGTERM saves first and exits with 75, also in a plain
`python script.py` ([interrupting and resuming](stopping.md#interrupting-and-resuming)). Commands
that have nothing to save exit with 130 or 143.

In Python, the same errors are exceptions; those with a link are in the
[API reference](reference.md#errors). Apart from 75, a plain `python script.py` ends with Python's
own exit code, which is 1 for an exception, and prints the traceback, which names your line; what is
wrong and what to do stand at its end, as `drivetrain train` prints them.

```bash
until drivetrain train --run-dir runs/mine --nproc-per-node 4 train.py; do
    [ $? -eq 75 ] || break      # any other code needs a person
    sleep 5                     # Ctrl-C also exits with 75: press it again here to end the loop
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
