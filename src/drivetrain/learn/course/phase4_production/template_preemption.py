"""Exercise preemption: SIGTERM in the middle of a step: finish it, save, and ask to come back.

Guidelines: guidelines.md, part 6. Check: drivetrain learn check preemption
"""

import signal  # noqa: F401
from typing import Any

import torch  # noqa: F401
import torch.distributed as dist  # noqa: F401

REQUEUE = 75
"""What a process exits with to be started again later: EX_TEMPFAIL of sysexits.h."""


def train(job: Any, save_every: int) -> int:
    """Train to the last step, or until the machine is wanted back; what the process exits with.

    job.step (how many steps are done), job.num_steps,
    job.one_step(), which all ranks call together, and which counts job.step up,
    job.save(), which all ranks call together; a new process goes on with what is saved.

    Saved is every save_every steps, and at the end. 0 means that all steps are done and saved,
    REQUEUE that SIGTERM has come and that what is done is saved.

    SIGTERM comes at any moment, on any rank or on several, once or twice; SIGKILL follows half a
    minute later. When train returns, SIGTERM does what it did before.
    """
    # TODO 1: notice SIGTERM, and do nothing about it while a step or a save is under way.
    # TODO 2: after each step: has any rank been asked to stop? All must have the same answer.
    # TODO 3: stop, saved, with the right exit code.
    raise NotImplementedError("TODO 1 to 3 of train")
