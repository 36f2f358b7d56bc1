"""What known devices can do at most: dense bf16 or fp16 operations a second, by their makers.

From NVIDIA's data sheets (without sparsity) and AMD's for MI300X. Names are parts of what the
driver calls a device; the first that fits counts, so the longer ones come first.
"""

from __future__ import annotations

PEAK_16_BIT_FLOPS = (
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("V100", 125e12),
    ("T4", 65e12),
    ("MI300X", 1307e12),
)


def peak_flops(device_name: str) -> float | None:
    """Of a device by its driver's name; None when it is not known."""
    return next((peak for part, peak in PEAK_16_BIT_FLOPS if part in device_name), None)
