"""The drills' workload, hurt: `die_at=STEP` kills rank 1 in the run's first life, `pause_s=S` slows
the steps down so that there is time for something else. Other words are the config's.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from drivetrain import Hook, Trainer
from drivetrain.verify.drills import workload

OWN = ("die_at", "pause_s")
WISHES = dict(word.split("=") for word in sys.argv[1:] if word.startswith(OWN))
sys.argv[1:] = [word for word in sys.argv[1:] if not word.startswith(OWN)]


class Hurt(Hook):
    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        time.sleep(float(WISHES.get("pause_s", "0")))
        is_due = step == int(WISHES.get("die_at", "-1"))
        if is_due and trainer.attempt == 1 and not trainer.is_main:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    os.environ["DRIVETRAIN_HOOKS"] = "__main__:Hurt"
    workload.main()
