"""Exercise parameter_server: one rank has the parameters, the others compute gradients.

Guidelines: guidelines.md, part 7. Check: drivetrain learn check parameter_server
"""

from collections.abc import Callable

import torch
import torch.distributed as dist  # noqa: F401


def serve(parameters: torch.Tensor, num_steps: int, learning_rate: float, max_lead: float) -> None:
    """Runs on rank 0: applies the gradients of all workers, and sends them new parameters.

    Each of the workers 1 … n−1 sends `num_steps` gradients. Each is applied as soon as it arrives,
    in place:

        parameters -= learning_rate * gradient / number of workers

    A worker that has sent t gradients may begin its next step when all others have sent at least
    t − max_lead: 0 is synchronous, 2 lets the fastest be two steps ahead of the slowest, math.inf
    is asynchronous. Until then the server does not answer it, but does answer others. Then it gets
    the parameters with all gradients that have arrived, including its own.

    dist.recv(tensor) without a source receives the first message, and returns the sender's rank.
    """
    # TODO 1: first parameters for all; then receive, apply, answer workers that may continue.
    raise NotImplementedError("TODO 1 of serve")


def work(
    gradient_of: Callable[[torch.Tensor, int], torch.Tensor], like: torch.Tensor, num_steps: int
) -> None:
    """Runs on the other ranks: `num_steps` times, get parameters, compute, send the gradient.

    gradient_of(parameters, step) computes; steps count from 0. `like` has the shape and type of the
    parameters.
    """
    # TODO 2: the loop.
    raise NotImplementedError("TODO 2 of work")
