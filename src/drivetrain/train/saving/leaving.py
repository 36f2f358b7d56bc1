"""How a loop of the user's own was left: by `break` or `return`, or by an error on its way up.

A generator is closed in both cases and is told nothing of the difference. It matters: what ends a
run properly is done by all ranks together, and a rank on which something failed is alone.
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
"""What Python is doing when a loop lets go of what it iterates over; an error is raised elsewhere:
in a call, an operator, a raise."""


def is_left_on_purpose() -> bool:
    """To be asked in the `except GeneratorExit` of a generator that a `for` goes through."""
    if sys.is_finalizing():  # nothing can be sent or written any more
        return False
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        frame = frame.f_back  # one around ours, which is being closed itself
    return frame is not None and frame.f_code.co_code[frame.f_lasti] in _DROPS_AN_ITERATOR
