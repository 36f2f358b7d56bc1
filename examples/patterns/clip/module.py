"""The towers and the halves of digits of examples/clip.py: the same file before and after."""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

sys.path.append(str(Path(__file__).parents[2]))
from clip import Clip

__all__ = ["Clip", "data"]

images = torch.tensor(load_digits().data[:1536] / 16, dtype=torch.float32)
data = TensorDataset(images[:, :32], images[:, 32:])
