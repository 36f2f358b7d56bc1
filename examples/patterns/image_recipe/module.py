"""A convolutional net with batch norm, and digits with MixUp: the same file before and after."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, TensorDataset

STEPS = 24
digits = load_digits()
images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
labels = torch.tensor(digits.target)
val = TensorDataset(images[768:1024], labels[768:1024])


class MixUp(Dataset):
    """Each image with a share of another one, and both of their labels."""

    def __len__(self):
        return 768

    def __getitem__(self, i):
        draws = torch.Generator().manual_seed(i)  # of its own: the same in every script
        other = int(torch.randint(768, (1,), generator=draws))
        share = float(torch.rand((), generator=draws)) / 2
        mixed = (1 - share) * images[i] + share * images[other]
        one_hot = F.one_hot(labels[[i, other]], 10).float()
        return mixed, (1 - share) * one_hot[0] + share * one_hot[1]


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def right(logits, labels, k):
    return (logits.topk(k, 1).indices == labels[:, None]).any(1).sum()
