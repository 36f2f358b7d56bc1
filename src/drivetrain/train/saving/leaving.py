"""Detect how a user's own loop was left: by `break` or `return`, or by an error.

A generator is closed in both cases and cannot see the difference. It matters because ending a run
properly involves all ranks, and a rank on which something failed is alone.
"""

from __future__ import annotations

import inspect
import opcode
import sys
from types import FrameType

_DROPS_AN_ITERATOR = {
    opcode.opmap[name]
    for name in ("POP_TOP", "POP_ITER", "FOR_ITER", "END_FOR")
    if name in opcode.opmap
}
"""Opcodes at which a loop drops its iterator. An error is raised at others: a call, an operator, a
raise."""


def is_left_on_purpose() -> bool:
    """True for `break` or `return`. Call it in a generator's `except GeneratorExit`."""
    if sys.is_finalizing():  # nothing can be sent or written anymore
        return False
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        frame = frame.f_back  # a generator around ours that is being closed too
    return frame is not None and frame.f_code.co_code[frame.f_lasti] in _DROPS_AN_ITERATOR
