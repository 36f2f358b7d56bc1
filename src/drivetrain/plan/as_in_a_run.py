"""Libraries that behave differently on fake tensors than in a run, kept from doing so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def as_in_a_run() -> Iterator[None]:
    """While this lasts, Hugging Face's models take samples for what they are: not packed.

    They look at the positions' values to see whether several sequences share a sample. Where there
    are no values they assume it, make a mask of length × length, and keep more for backward.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    look = getattr(masking, "find_packed_sequence_indices", None)
    if look is None:
        yield
        return
    masking.find_packed_sequence_indices = lambda *_, **__: None
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = look
