"""A student beside a frozen teacher with dropout and batch norm: the same file before and after."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

digits = load_digits()
images = torch.tensor(digits.data[:768] / 16, dtype=torch.float32)
data = TensorDataset(images, torch.tensor(digits.target[:768]))


class Pupil(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
        hidden = (nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.5))
        self.teacher = nn.Sequential(*hidden, nn.Linear(128, 10)).eval().requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            taught = self.teacher(x)
        return self.student(x), taught


def loss(model, batch):
    student, teacher = model(batch[0])
    ce = F.cross_entropy(student, batch[1])
    teacher = F.softmax(teacher / 2, 1)
    kl = 4 * F.kl_div(F.log_softmax(student / 2, 1), teacher, reduction="batchmean")
    return ce + kl, {"ce": ce, "kl": kl}
