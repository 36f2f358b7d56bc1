"""Running the trainer in a driver, and the driver's exit code."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import WorkerFailure
from drivetrain.launch.targets.ray.worker import STOPPED
from drivetrain.supervise.policy import PREEMPTED_CODE

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

_LOGS_S = 1.0


def fit(trainer: TorchTrainer) -> int:
    """Train to the end; return the driver's exit code, 75 if saved and to be resumed."""
    code, last_words = _outcome(trainer)
    if last_words:
        _hear_the_workers_out()
        sys.stderr.write(f"\n{last_words}\n")
    return code


def _outcome(trainer: TorchTrainer) -> tuple[int, str]:
    from ray.train import TrainingFailedError

    try:
        result: Any = trainer.fit()
    except TrainingFailedError as error:
        # the judge's message, if it ended the run; Ray has already printed its own errors
        return WorkerFailure.exit_code, str(getattr(error, "controller_failure", error))
    if getattr(result, "return_value", None) == STOPPED:
        said = "the run was asked to stop and has saved; drivetrain resume continues it"
        return PREEMPTED_CODE, said
    return 0, ""


def _hear_the_workers_out() -> None:
    """Wait for the workers' output, which Ray forwards with a delay, then shut Ray down."""
    import ray

    time.sleep(_LOGS_S)
    ray.shutdown()
