# deepspeed --num_accelerators 2 before.py
import json

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

deepspeed.init_distributed()
digits = load_digits()
images = torch.tensor(digits.data[:1536] / 16, dtype=torch.float32)
data = TensorDataset(images, torch.tensor(digits.target[:1536]))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
settings = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 16,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, shuffle=False))

losses: list[float] = []
parts: list[torch.Tensor] = []
for _ in range(2):
    for x, y in loader:
        loss = F.cross_entropy(engine(x), y)
        engine.backward(loss)
        parts.append(loss.detach())
        if engine.is_gradient_accumulation_boundary():
            mean = torch.stack(parts).mean()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
            parts = []
        engine.step()

if dist.get_rank() == 0:
    print("losses", json.dumps(losses))
