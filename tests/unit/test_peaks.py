from __future__ import annotations

import pytest

from drivetrain.cluster.catalogue import peak_flops

# what drivers call them (torch.cuda, torch.xpu and torch.hpu get_device_name)
KNOWN = {
    "NVIDIA GB200": 2500,
    "NVIDIA B200": 2250,
    "NVIDIA GH200 480GB": 989,
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 835,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "A100-SXM4-40GB": 312,  # before driver 510
    "NVIDIA A10": 125,
    "NVIDIA A10G": 70,
    "NVIDIA A40": 150,
    "NVIDIA L4": 121,
    "NVIDIA L40": 181,
    "NVIDIA L40S": 362,
    "NVIDIA RTX A6000": 155,
    "NVIDIA RTX 6000 Ada Generation": 364,
    "NVIDIA GeForce RTX 4090": 165,
    "Tesla V100-SXM2-16GB": 125,
    "Tesla V100-PCIE-16GB": 112,
    "Tesla T4": 65,
    "AMD Instinct MI250X": 191.5,
    "AMD Instinct MI300X": 1307,
    "AMD Instinct MI325X": 1307,
    "AMD Instinct MI355X": 2516,
    "GAUDI2": 432,
    "Intel(R) Data Center GPU Max 1100": 352,
}
UNKNOWN = (
    "NVIDIA RTX A1000",  # no A100
    "NVIDIA RTX A1000 Laptop GPU",
    "NVIDIA RTX A4000",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",  # a seventh of one
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA H100 80GB HBM2e",
    "GRID A100-10C",  # a share of one
    "NVIDIA A16",
    "NVIDIA L20",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "Quadro RTX 6000",  # nothing to do with RTX 6000 Ada
    "AMD Instinct MI250X/MI250",
    "AMD Instinct MI300A",
    "Intel(R) Data Center GPU Max 1550",
    "Tesla V100",
    "cpu (x86_64)",
    "strict",
    "",
)


@pytest.mark.parametrize(("name", "tflops"), KNOWN.items())
def test_a_device_has_its_own_peak(name: str, tflops: float) -> None:
    assert peak_flops(name) == tflops * 1e12


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_device_that_is_not_known_has_none(name: str) -> None:
    assert peak_flops(name) is None
