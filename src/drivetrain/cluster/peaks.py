"""What known devices can do at most: dense bf16 or fp16 operations a second, by their makers.

From the makers' data sheets, without sparsity. GeForce cards add 16-bit products up in fp32, as
training does, at half the advertised rate: that half is here. A name is exactly what the driver
calls a device, so that an L40 is no L4 and an RTX A1000 no A100; a slice of a device (MIG, vGPU)
has a name of its own. A device that is not here has no peak, rather than another one's.

Left out, because one name stands for several peaks: "AMD Instinct MI250X/MI250" (two products),
"Intel(R) Data Center GPU Max 1550" (one of its tiles, or both), "NVIDIA H100 80GB HBM2e" (several
boards).
"""

from __future__ import annotations

_TERA = 1e12
PEAK_16_BIT_TFLOPS = {
    "NVIDIA GB300": 2500,
    "NVIDIA GB200": 2500,
    "NVIDIA B300 SXM6 AC": 2250,
    "NVIDIA B200": 2250,
    "NVIDIA GH200 480GB": 989,
    "NVIDIA GH200 120GB": 989,
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 835,
    "NVIDIA H100 80GB HBM3": 989,  # SXM
    "NVIDIA H100 NVL": 835,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H800": 989,
    "NVIDIA H20": 148,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA A800-SXM4-80GB": 312,
    "NVIDIA A40": 150,
    "NVIDIA A30": 165,
    "NVIDIA A10": 125,
    "NVIDIA A10G": 70,
    "NVIDIA L40S": 362,
    "NVIDIA L40": 181,
    "NVIDIA L4": 121,
    "NVIDIA RTX 6000 Ada Generation": 364,
    "NVIDIA RTX A6000": 155,
    "NVIDIA GeForce RTX 5090": 209.5,
    "NVIDIA GeForce RTX 4090": 165,
    "NVIDIA GeForce RTX 3090": 71,
    "Tesla V100S-PCIE-32GB": 130,
    "Tesla V100-SXM3-32GB": 125,
    "Tesla V100-SXM2-16GB": 125,
    "Tesla V100-SXM2-32GB": 125,
    "Tesla V100-PCIE-16GB": 112,
    "Tesla V100-PCIE-32GB": 112,
    "Tesla T4": 65,
    "AMD Instinct MI355X": 2516,
    "AMD Instinct MI350X": 2300,
    "AMD Instinct MI325X": 1307,
    "AMD Instinct MI300X": 1307,
    "AMD Instinct MI300X VF": 1307,
    "AMD Instinct MI250X": 191.5,  # one of its two dies: a program sees each as a device
    "AMD Instinct MI210": 181,
    "GAUDI3": 1835,
    "GAUDI2": 432,
    "Intel(R) Data Center GPU Max 1100": 352,
}
_BY_NAME = {name.casefold(): tflops * _TERA for name, tflops in PEAK_16_BIT_TFLOPS.items()}


def peak_flops(device_name: str) -> float | None:
    """Of a device by its driver's name; None when it is not known."""
    name = " ".join(device_name.split()).casefold()
    # drivers before 510 left the maker's name out: "A100-SXM4-40GB"
    return _BY_NAME.get(name) or _BY_NAME.get(f"nvidia {name}")
