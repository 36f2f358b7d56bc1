"""What one rehearsed rank writes to another: the collective it is at, and small tensors."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from typing import Any

import torch

from drivetrain.checkpoint.shards import raw_bytes
from drivetrain.core.bounded import parse_json
from drivetrain.rehearse.calls import Call

Shape = tuple[str, int, str]


def written(call: Call, values: Sequence[torch.Tensor]) -> str:
    """For the store."""
    return json.dumps({"shape": call.shape, "values": [_tensor_out(value) for value in values]})


def read(text: bytes) -> tuple[Shape, list[torch.Tensor]]:
    """What the other is at (`Call.shape`) and what it gives; ValueError when it is no letter."""
    try:
        document = parse_json(text)
        name, num_bytes, dtype = document["shape"]
        values = [_tensor_in(value) for value in document["values"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a letter: {error}") from None
    return (str(name), int(num_bytes), str(dtype)), values


def _tensor_out(tensor: torch.Tensor) -> dict[str, Any]:
    data = base64.b64encode(raw_bytes(tensor)).decode()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(tensor.shape), "data": data}


def _tensor_in(value: dict[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, value["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{value['dtype']} is no number format")
    shape, data = [int(size) for size in value["shape"]], base64.b64decode(value["data"])
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError("a tensor's bytes do not fit its shape")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
