"""How a driver runs its trainer, and what it ends with."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import WorkerFailure
from drivetrain.launch.targets.ray.worker import STOPPED
from drivetrain.supervise.policy import PREEMPTED_CODE

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer


def fit(trainer: TorchTrainer) -> int:
    """Train to the end; the driver's exit code, 75 meaning: saved, submit it again to go on."""
    from ray.train import TrainingFailedError

    try:
        result: Any = trainer.fit()
    except TrainingFailedError as error:
        # what the judge said is the last word; of Ray's own there is more above
        cause = getattr(error, "controller_failure", None)
        sys.stderr.write(f"\n{cause or error}\n")
        return WorkerFailure.exit_code
    if getattr(result, "return_value", None) == STOPPED:
        sys.stderr.write("\nthe run was asked to stop and has saved; drivetrain resume goes on\n")
        return PREEMPTED_CODE
    return 0
