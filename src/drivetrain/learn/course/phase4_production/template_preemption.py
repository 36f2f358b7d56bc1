"""Exercise preemption: on SIGTERM, finish the step, save, and ask to be restarted.

Guidelines: guidelines.md, part 6. Check: drivetrain learn check preemption
"""

import signal  # noqa: F401
from typing import Any

import torch  # noqa: F401
import torch.distributed as dist  # noqa: F401

REQUEUE = 75
"""Exit code of a process that wants to be restarted later: EX_TEMPFAIL of sysexits.h."""


def train(job: Any, save_every: int) -> int:
    """Train to the last step, or until SIGTERM; return the process's exit code.

    job.step (how many steps are done), job.num_steps,
    job.one_step(), which all ranks call together, and which increments job.step,
    job.save(), which all ranks call together; a new process resumes from what is saved.

    Save every save_every steps, and at the end. Return 0 if all steps are done and saved, or
    REQUEUE if SIGTERM arrived and the steps done so far are saved.

    SIGTERM may arrive at any moment, on one rank or on several, once or twice; SIGKILL follows half
    a minute later. When train returns, the previous handler of SIGTERM must be restored.
    """
    # TODO 1: notice SIGTERM, but do not act on it during a step or a save.
    # TODO 2: after each step: did any rank get SIGTERM? All ranks must agree on the answer.
    # TODO 3: save, and return the right exit code.
    raise NotImplementedError("TODO 1 to 3 of train")
