"""What a model computes in, by the config's word for it; None: in what its weights are."""

from __future__ import annotations

import torch

COMPUTE_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
