from __future__ import annotations

import pytest

from drivetrain.cluster.file import _large, _small
from drivetrain.plan.probe import HOST, accelerator_sizes

GIB, MIB = 1 << 30, 1 << 20
# memory, what the driver says of the cache (torch.cuda.get_device_properties), and the real last
# level of it
DEVICES = {
    "T4": (15 * GIB, 4 * MIB, 4 * MIB),
    "L4": (22 * GIB, 48 * MIB, 48 * MIB),
    "L40S": (44 * GIB, 96 * MIB, 96 * MIB),
    "A100": (40 * GIB, 40 * MIB, 40 * MIB),
    "H100": (80 * GIB, 50 * MIB, 50 * MIB),
    "B200": (178 * GIB, 126 * MIB, 126 * MIB),
    "MI300X": (191 * GIB, 4 * MIB, 256 * MIB),  # the Infinity Cache is not told
    "MI250X": (64 * GIB, 8 * MIB, 8 * MIB),
    "not told": (16 * GIB, None, 16 * MIB),
}


@pytest.mark.parametrize("name", DEVICES)
def test_an_accelerators_tensors_are_larger_than_its_cache(name: str) -> None:
    memory, told, cache = DEVICES[name]
    sizes = accelerator_sizes(memory, told)
    assert sizes.tensor_bytes > 2 * cache
    largest = sizes.sides[-1]
    assert 3 * 2 * largest**2 > 2 * cache
    # a dozen results, the input and the largest product in fp32 leave most of the memory alone
    assert 13 * sizes.tensor_bytes + 3 * 4 * largest**2 < memory / 6
    assert list(sizes.sides) == sorted(set(sizes.sides))


def test_a_host_stays_quick() -> None:
    assert max(HOST.sides) == 1024
    assert HOST.tensor_bytes == 8 * MIB


def test_large_products_are_large_for_their_device() -> None:
    """The same rule gives a host's from 256 on, and leaves an accelerator's small ones out."""
    host = {64: 1.0, 128: 2.0, 256: 4.0, 512: 5.0, 1024: 6.0}
    assert _large(host) == 5.0
    gpu = {256: 1.0, 512: 8.0, 1024: 40.0, 2048: 90.0, 4096: 100.0, 8192: 110.0}
    assert _large(gpu) == 100.0
    assert _small(gpu) > 0
