"""Generator, critic and gradient penalty: the same file before and after."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

NOISE, CRITIC_STEPS, STEPS = 16, 3, 16
images = torch.tensor(load_digits().data[:512] / 8 - 1, dtype=torch.float32)
# Drawn beforehand, so that every script has the same: the noise of each pass, and where to look at the slope.
draws = torch.Generator().manual_seed(1)
noise = torch.randn(512, CRITIC_STEPS + 1, NOISE, generator=draws)
shares = torch.rand(512, CRITIC_STEPS, generator=draws)
data = TensorDataset(images, noise, shares)


def net(before, after):
    return nn.Sequential(nn.Linear(before, 64), nn.LeakyReLU(0.2), nn.Linear(64, after))


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.9))


def critic_loss(critic, real, fake, share):
    between = (share * real + (1 - share) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
    return critic(fake).mean() - critic(real).mean() + 10 * penalty
