# python before.py
import json

import torch
from module import CRITIC_STEPS, NOISE, adam, critic_loss, data, net
from torch.utils.data import DataLoader

torch.manual_seed(0)
G, D = net(NOISE, 64), net(64, 1)
opt_g, opt_d = adam(G), adam(D)

losses = []
for real, noise, shares in DataLoader(data, batch_size=32):
    parts = []
    for i in range(CRITIC_STEPS):
        fake = G(noise[:, i]).detach()
        loss = critic_loss(D, real, fake, shares[:, i, None])
        loss.backward()
        opt_d.step()
        opt_d.zero_grad()
        parts.append(loss.item())
    D.requires_grad_(False)
    loss = -D(G(noise[:, -1])).mean()
    loss.backward()
    D.requires_grad_(True)
    opt_g.step()
    opt_g.zero_grad()
    losses.append(sum(parts) / CRITIC_STEPS + loss.item())

print("losses", json.dumps(losses))
