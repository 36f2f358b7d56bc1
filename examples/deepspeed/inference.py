"""Weights that a run has left, served by DeepSpeed's inference engine: on a CPU, or a GPU.

drivetrain train examples/deepspeed/train.py --nproc-per-node 2 name=served
python examples/deepspeed/inference.py runs/served/checkpoints/weights.pt
"""

import sys

import deepspeed
import torch
from sklearn.datasets import load_digits
from train import model as make_model

digits = load_digits()
inputs = torch.tensor(digits.data / 16, dtype=torch.float32)
model = make_model().eval()
model.load_state_dict(torch.load(sys.argv[1], weights_only=True))
# fp32, whole, without DeepSpeed's kernels: those are for transformers on GPUs.
settings = {"dtype": torch.float32, "replace_with_kernel_inject": False}
engine = deepspeed.init_inference(model, **settings)  # type: ignore[attr-defined]  # this folder's name
with torch.inference_mode():
    right = engine(inputs).argmax(1) == torch.tensor(digits.target)
    plain = model(inputs).argmax(1) == torch.tensor(digits.target)
print(f"accuracy {right.float().mean():.4f} by DeepSpeed, {plain.float().mean():.4f} without")
