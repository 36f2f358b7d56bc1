"""A Hugging Face stream of four shards behind a shuffle buffer: the same file before and after."""

import datasets
import torch
from sklearn.datasets import load_digits
from torch import nn

digits = load_digits()
rows = {"x": (digits.data[:400] / 16).tolist(), "y": digits.target[:400].tolist()}
stream = datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=4)
stream = stream.shuffle(seed=0, buffer_size=50)


def collate(samples):
    return torch.tensor([s["x"] for s in samples]), torch.tensor([s["y"] for s in samples])


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
