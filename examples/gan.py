"""WGAN-GP on digits: two models, two optimizers and a gradient penalty, in your own loop.

python examples/gan.py
drivetrain train examples/gan.py --nproc-per-node 2
drivetrain train examples/gan.py --nproc-per-node 2 parallel.strategy=fsdp
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import drivetrain

NOISE, CRITIC_STEPS = 16, 5


def net(before: int, after: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(before, 128),
        nn.LeakyReLU(0.2),
        nn.Linear(128, 128),
        nn.LeakyReLU(0.2),
        nn.Linear(128, after),
    )


def noise_for(real: torch.Tensor) -> torch.Tensor:
    return torch.randn(len(real), NOISE, device=real.device)


def penalty(critic: nn.Module, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """How far the norm of the critic's gradient between real and fake images is from 1."""
    share = torch.rand(len(real), 1, device=real.device)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    distance: torch.Tensor = (slope.norm(dim=1) - 1) ** 2
    return distance.mean()


def main() -> None:
    images = torch.tensor(load_digits().data / 8 - 1, dtype=torch.float32)
    config = drivetrain.load_config(
        defaults={
            "global_batch_size": 64,
            "micro_batch_size": 32,
            "max_steps": 20,
            "record": {"logging_steps": 10},
        }
    )
    torch.manual_seed(0)  # the same initial weights in every run
    G, D = net(NOISE, 64), net(64, 1)  # noqa: N806 - their usual names
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.9))

    loop = drivetrain.prepare(
        {"G": G, "D": D}, {"G": opt_g, "D": opt_d}, TensorDataset(images), config
    )
    for step in loop.steps():  # one global batch
        for _ in range(CRITIC_STEPS):
            for (real,) in step:  # this rank's micro-batches; a new pass each time
                fake = G(noise_for(real)).detach()
                slope = penalty(D, real, fake)
                loop.backward((D(fake).mean() - D(real).mean() + 10 * slope, {"slope": slope}), "D")
            loop.step("D")
        for (real,) in step:
            loop.backward(-D(G(noise_for(real))).mean(), "G")  # gives D no gradients
        loop.step("G")

    if loop.is_main:
        last = loop.history.steps[-1]
        print(f"{last.step} steps, " + ", ".join(f"{k} {v:.4f}" for k, v in last.parts.items()))


if __name__ == "__main__":
    main()
