"""Slow imports, made once by the process that the ranks of all tests are forked from."""

from __future__ import annotations

from drivetrain.core.imports import import_for_forks

import_for_forks(("torch._dynamo", "torch.distributed.fsdp", "drivetrain.train.trainer"))
