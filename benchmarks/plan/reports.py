"""Public training reports, as they say it themselves: what was run, and how fast it was.

Every figure was read in the file that `source` names. Only runs in bf16; where a report has more
rows than are here, those with compiled fp8 or with parts that no plan of ours has were left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.parallel.layout import Layout

_TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
_TITAN_TP = "torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md, without async tp"
_TITAN_A100 = "torchtitan, docs/performance.md (2024)"
_FMS = "foundation-model-stack/fms-fsdp, README.md"
_MPT = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md"

# torchtitan describes its H100 as 96 GB at 2.4 TB/s, held to 500 of 700 W
H100_500W = "h100-96"


@dataclass(frozen=True)
class Report:
    """What was run, and what was reported."""

    name: str
    source: str
    model: str
    """A public architecture, or one of `DECODERS`."""
    device: str
    layout: Layout
    micro_batch_size: int
    accumulation: int
    recompute: str
    tokens_per_device_s: float
    sequence_length: int = 8192
    memory_gib: float | None = None
    is_compiled: bool = False

    @property
    def shares_sequences(self) -> bool:
        """Tensor parallelism as torchtitan does it divides norms along the sequence."""
        return self.layout.tp > 1


@dataclass(frozen=True)
class Decoder:
    """A plain GPT: layers of width × width, four times as wide in the middle."""

    width: int
    layers: int
    heads: int
    vocabulary: int = 50368


DECODERS = {
    "mpt-3b": Decoder(2560, 32, 20),
    "mpt-7b": Decoder(4096, 32, 32),
    "mpt-13b": Decoder(5120, 40, 40),
    "mpt-30b": Decoder(7168, 48, 56),
    "mpt-70b": Decoder(8192, 80, 64),
}


def _titan(
    name: str,
    model: str,
    device: str,
    layout: Layout,
    batch: int,
    recompute: str,
    rate: float,
    **more: object,
) -> Report:
    source = _TITAN_A100 if "A100" in name or "405B" in name else _TITAN
    source = _TITAN_TP if more.get("is_compiled") else source
    return Report(name, source, model, device, layout, batch, 1, recompute, rate, **more)  # type: ignore[arg-type]


def _fms(size: str, model: str, layout: Layout, batch: int, recompute: str, rate: float) -> Report:
    name = f"Llama 2 {size}, 128 A100"
    return Report(name, _FMS, model, "a100-80", layout, batch, 1, recompute, rate, 4096)


def _mpt(
    size: str, device: str, devices: int, batch: int, turns: int, recompute: str, rate: float
) -> Report:
    kind = {"h100": "H100", "a100-80": "A100"}[device]
    return Report(
        f"MPT {size}, {devices} {kind}",
        _MPT,
        f"mpt-{size.lower()}",
        device,
        Layout(dp_shard=devices),
        batch,
        turns,
        recompute,
        rate,
        2048,
    )


_PER_NODE = Layout(dp_replicate=16, dp_shard=8)

REPORTS = (
    _titan(
        "8B, 8 H100",
        "llama-3-8b",
        H100_500W,
        Layout(dp_shard=8),
        2,
        "selective",
        5762,
        memory_gib=82.4,
    ),
    _titan(
        "8B, 128 H100",
        "llama-3-8b",
        H100_500W,
        Layout(dp_shard=128),
        2,
        "selective",
        5605,
        memory_gib=67.0,
    ),
    _titan("8B, 64 A100", "llama-3-8b", "a100-80", Layout(dp_shard=64), 1, "selective", 2973),
    _titan("70B, 64 A100", "llama-3-70b", "a100-80", Layout(dp_shard=64), 1, "full", 331),
    _titan(
        "Llama 2 13B, 64 A100",
        "llama-2-13b",
        "a100-80",
        Layout(dp_shard=64),
        2,
        "none",
        2162,
        sequence_length=4096,
    ),
    _titan(
        "Llama 2 70B, 64 A100",
        "llama-2-70b",
        "a100-80",
        Layout(dp_shard=64),
        2,
        "full",
        353,
        sequence_length=4096,
    ),
    _titan(
        "405B, 128 H100, tp 8",
        "llama-3-405b",
        H100_500W,
        Layout(dp_shard=16, tp=8),
        2,
        "full",
        109,
    ),
    _titan(
        "70B, 256 H100, tp 8",
        "llama-3-70b",
        H100_500W,
        Layout(dp_shard=32, tp=8),
        16,
        "full",
        597.3,
        is_compiled=True,
    ),
    _titan(
        "8B, 64 H100, tp 8",
        "llama-3-8b",
        H100_500W,
        Layout(dp_shard=8, tp=8),
        12,
        "selective",
        4378,
        is_compiled=True,
    ),
    _fms("7B", "llama-2-7b", _PER_NODE, 2, "none", 3760),
    _fms("13B", "llama-2-13b", _PER_NODE, 1, "none", 1700),
    _fms("70B", "llama-2-70b", Layout(dp_shard=128), 6, "full", 380),
    _mpt("3B", "a100-80", 8, 10, 2, "none", 10811),
    _mpt("7B", "a100-80", 8, 6, 2, "none", 4641),
    _mpt("13B", "a100-80", 8, 2, 3, "none", 2262),
    _mpt("30B", "a100-80", 8, 3, 21, "full", 916),
    _mpt("7B", "h100", 8, 6, 1, "none", 10643),
    _mpt("13B", "h100", 8, 2, 1, "none", 4792),
    _mpt("13B", "h100", 64, 2, 1, "none", 4800),
    _mpt("30B", "h100", 32, 14, 3, "full", 2308),
    _mpt("70B", "h100", 64, 8, 4, "full", 1039),
)
