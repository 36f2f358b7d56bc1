"""One thing that the field's documents print, and what happens to it here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["works", "refused", "not yet", "not run"]


@dataclass(frozen=True)
class Row:
    """A snippet or a command.

    Attributes:
        key: Its name among the rows.
        printed: The call or command with its arguments, as a reader would try it.
        outcome: What happens.
        remark: How; of what is refused, the words of the refusal.
        code: What is run for it, on two ranks with a model and data (`prelude.py`).
        command: Or the command that is run, in a folder with `train.py` and `own_loop.py`.
        needs: A library without which it is skipped.
        shown_by: Or the test that shows it, where one does already.
    """

    key: str
    printed: str
    outcome: Outcome
    remark: str = ""
    code: str = ""
    command: str = ""
    needs: str = ""
    shown_by: str = ""
