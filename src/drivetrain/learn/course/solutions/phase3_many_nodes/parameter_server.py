"""A parameter server; the synchronous and asynchronous modes differ in which workers it answers."""

from collections.abc import Callable

import torch
import torch.distributed as dist


def serve(parameters: torch.Tensor, num_steps: int, learning_rate: float, max_lead: float) -> None:
    """Runs on rank 0: applies the gradients of all workers, and sends them new parameters."""
    num_workers = dist.get_world_size() - 1
    num_sent = dict.fromkeys(range(1, num_workers + 1), 0)
    waiting = set(num_sent)
    answer(waiting, num_sent, parameters, max_lead)

    gradient = torch.empty_like(parameters)
    for _ in range(num_workers * num_steps):
        worker = dist.recv(gradient)  # from any worker: the server does not wait for a slow one
        parameters -= learning_rate * gradient / num_workers
        num_sent[worker] += 1
        if num_sent[worker] < num_steps:
            waiting.add(worker)
        # Not only this worker: it may have been the slowest, and others may have waited for it.
        answer(waiting, num_sent, parameters, max_lead)


def answer(
    waiting: set[int], num_sent: dict[int, int], parameters: torch.Tensor, max_lead: float
) -> None:
    """Answer the waiting workers that are not too far ahead of the slowest."""
    slowest = min(num_sent.values())
    for worker in sorted(waiting):
        if num_sent[worker] - slowest <= max_lead:
            waiting.remove(worker)
            dist.send(parameters, worker)


def work(
    gradient_of: Callable[[torch.Tensor, int], torch.Tensor], like: torch.Tensor, num_steps: int
) -> None:
    """Runs on the other ranks: get parameters, compute, send the gradient."""
    parameters = torch.empty_like(like)
    for step in range(num_steps):
        dist.recv(parameters, src=0)
        dist.send(gradient_of(parameters, step), dst=0)
