"""Exercise final_system: train through kill -9 and newcomers, with the losses of one process.

Guidelines: guidelines.md, part 7. Check: drivetrain learn check final_system
"""

import time  # noqa: F401
from pathlib import Path
from typing import Any

QUIET_S = 0.6
BEAT_S, SLOW_AFTER_S, DEAD_AFTER_S = 0.1, 1.0, 1.5


def train(parts: Any, store: Any, name: str, folder: Path, job: Any) -> None:
    """Train `job` to its last step, with the processes that are there; called once by each.

    parts.checkpoint, parts.resume, parts.failure_detection, parts.rendezvous
        what you have written, as modules
    store, name
        as in rendezvous.join; one process is enough to continue
    folder
        for checkpoints, shared by all processes
    job.step, job.num_steps, job.save_every; job.model … as in resume
    job.connect(number, rank, num_ranks), job.disconnect()
        form and leave the process group of world `number`; disconnect may be called at any time
    job.one_step(is_over)
        a step on the ranks of this world. While it waits for the others it calls is_over()
        repeatedly, and raises job.Interrupted when that returns True
    A call of torch.distributed raises RuntimeError when a member of the world has left.
    """
    # TODO 1: agree on a world and form its process group, as long as steps are left.
    # TODO 2: in every new world, begin with the newest checkpoint, if there is one.
    # TODO 3: beat, and watch: is a member dead, or does a process wait for the next world?
    # TODO 4: step and save until this world is over; then leave it and clean up.
    raise NotImplementedError("TODO 1 to 4 of train")
