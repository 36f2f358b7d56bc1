# drivetrain train --nproc-per-node 2 after.py
import json

import torch
from module import CRITIC_STEPS, NOISE, STEPS, adam, critic_loss, data, net
from torch.utils.data import DataLoader

import drivetrain

torch.manual_seed(0)
G, D = net(NOISE, 64), net(64, 1)
optimizers = {"G": adam(G), "D": adam(D)}
config = drivetrain.load_config(defaults={"global_batch_size": 32, "max_steps": STEPS})
loop = drivetrain.prepare({"G": G, "D": D}, optimizers, DataLoader(data), config)

for step in loop.steps():
    for i in range(CRITIC_STEPS):
        for real, noise, shares in step:
            fake = G(noise[:, i]).detach()
            loop.backward(critic_loss(D, real, fake, shares[:, i, None]), "D")
        loop.step("D")
    for _, noise, _ in step:
        loop.backward(-D(G(noise[:, -1])).mean(), "G")
    loop.step("G")

if loop.is_main:
    print("losses", json.dumps(loop.history.losses))
