# torchrun --nproc-per-node 2 before.py
import json

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
digits = load_digits()
images = torch.tensor(digits.data[:1536] / 16, dtype=torch.float32)
data = TensorDataset(images, torch.tensor(digits.target[:1536]))

torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, batch_size=32, sampler=sampler)  # per rank

losses = []
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())

if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "weights.pt")
    print("losses", json.dumps(losses))
dist.destroy_process_group()
