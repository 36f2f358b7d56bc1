"""Step tables without a run."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from drivetrain.record.step_file import FIELDS


def table(compute_s: Any, first_step: int = 1) -> NDArray[Any]:
    values = np.asarray(compute_s)
    records = np.zeros(values.size, np.dtype(list(FIELDS)))
    records["step"] = np.arange(first_step, first_step + values.size)
    records["attempt"] = 1
    records["compute_s"] = values
    return records
