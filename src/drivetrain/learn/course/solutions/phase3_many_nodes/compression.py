"""Compressed all-reduces: what is not sent now is not lost, but added to the next gradient."""

import torch
import torch.distributed as dist


class TopK:
    """Every rank sends only its largest entries, and adds the rest to its next gradient."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.left_over = None

    def all_reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        num_ranks = dist.get_world_size()
        wanted = gradient if self.left_over is None else gradient + self.left_over
        num_sent = round(self.share * len(wanted))
        indices = wanted.abs().topk(num_sent).indices  # by size: -5 matters more than 1
        values = wanted[indices]
        self.left_over = wanted.clone()
        self.left_over[indices] = 0

        all_values = torch.empty(num_ranks * num_sent)
        dist.all_gather_into_tensor(all_values, values)
        all_indices = torch.empty(num_ranks * num_sent, dtype=torch.int32)
        dist.all_gather_into_tensor(all_indices, indices.int())  # half of what int64 would take
        # index_add_: several ranks may have sent the same index, and all of them count.
        summed = torch.zeros_like(gradient)
        summed.index_add_(0, all_indices, all_values)
        return summed / num_ranks


class PowerSGD:
    """Sends a matrix as two thin ones, whose product approximates it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.q = None
        self.left_over = None

    def all_reduce(self, matrix: torch.Tensor) -> torch.Tensor:
        if self.q is None:
            generator = torch.Generator().manual_seed(0)  # the same on all ranks
            self.q = torch.randn(matrix.shape[1], self.rank, generator=generator)
            self.left_over = torch.zeros_like(matrix)
        wanted = matrix + self.left_over
        p = mean(wanted @ self.q)
        p = torch.linalg.qr(p).Q  # orthonormal columns: P·Pᵀ projects onto what they span
        self.q = mean(wanted.T @ p)  # and the last Q is a good first guess for the next step
        result = p @ self.q.T
        self.left_over = wanted - result
        return result


def mean(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.contiguous()
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()
