"""The drop-in trainer PyTorchDDPTrainer, which starts its own two processes.

python examples/ddp_drop_in.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import PyTorchDDPTrainer

digits = load_digits()
data = TensorDataset(
    torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
)

trainer = PyTorchDDPTrainer(
    model=nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
    num_gpus=2,  # without GPUs: two CPU processes
    batch_size=32,  # per process
    epochs=10,
    learning_rate=0.003,
)
history = trainer.fit(DataLoader(data, shuffle=True), DataLoader(data), checkpoint_dir="runs/saved")
print(f"training time {history.total_time:.2f} s, best accuracy {history.best_accuracy:.4f}")
