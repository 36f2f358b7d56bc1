"""How a driver runs its trainer, and what it ends with."""

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
    """Train to the end; the driver's exit code, 75 meaning: saved, submit it again to go on."""
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
        # the judge's words, where it has spoken; of Ray's own there is more above
        return WorkerFailure.exit_code, str(getattr(error, "controller_failure", error))
    if getattr(result, "return_value", None) == STOPPED:
        said = "the run was asked to stop and has saved; drivetrain resume goes on"
        return PREEMPTED_CODE, said
    return 0, ""


def _hear_the_workers_out() -> None:
    """Ray hands on what workers print with a delay; without it, nothing comes after this."""
    import ray

    time.sleep(_LOGS_S)
    ray.shutdown()
