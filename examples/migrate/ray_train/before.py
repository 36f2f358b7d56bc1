# python before.py
import json
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_loop(config: dict[str, Any]) -> None:
    digits = load_digits()
    images = torch.tensor(digits.data[:1536] / 16, dtype=torch.float32)
    data = TensorDataset(images, torch.tensor(digits.target[:1536]))
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    loader = prepare_data_loader(DataLoader(data, batch_size=32))  # per worker

    losses = []
    for _ in range(2):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
    ray.train.report({"loss": losses[-1]})
    if ray.train.get_context().get_world_rank() == 0:
        print("losses", json.dumps(losses))


trainer = TorchTrainer(
    train_loop,
    train_loop_config={"lr": 2e-3},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=str(Path("results").resolve())),
)
trainer.fit()
