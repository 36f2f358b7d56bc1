"""Predictions next to public training reports: `python -m drivetrain.bench.plan.published FOLDER`.

Each report's own layout, micro-batch and recomputation are priced; nothing is searched and nothing
fitted. Their programs are not ours (compiled or fused kernels, other losses), and their clusters
are known only as far as they say.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from drivetrain.bench.plan.models import GPT
from drivetrain.cluster.description import Cluster
from drivetrain.cluster.file import ClusterFile, cluster_from
from drivetrain.parallel.layout import Layout
from drivetrain.plan.candidate import Candidate
from drivetrain.plan.estimate import estimate
from drivetrain.plan.profiling import Profiler
from drivetrain.plan.sources import from_architecture
from drivetrain.plan.subject import Subject, token_batch

_TITAN = "torchtitan benchmarks/llama3_h100_202412_torchtitan.md"
_TITAN_A100 = "torchtitan docs/performance.md, 64 A100 80GB"
_MEGATRON = "Narayanan et al. 2021 (arXiv:2104.04473), table 1"
_IBM = "PyTorch blog, Maximizing training throughput (2024)"


@dataclass(frozen=True)
class Report:
    """What was run, and what was reported."""

    name: str
    source: str
    model: str
    device: str
    layout: Layout
    strategy: str
    micro_batch_size: int
    accumulation: int
    recompute: str
    tokens_per_device_s: float
    memory_gib: float | None = None
    sequence_length: int = 8192


def _megatron(name: str, devices: int, batch: int, tp: int, pp: int, rate: float) -> Report:
    """`rate`: Tflop/s per device, recomputation counted, as the paper counts."""
    width, layers, _ = _GPTS[name]
    length, vocabulary = 2048, 51200
    # the paper's formula for operations per step
    flops = 96.0 * batch * length * layers * width**2
    flops *= 1 + length / (6 * width) + vocabulary / (16 * layers * width)
    seconds = flops / (rate * 1e12 * devices)
    dp = devices // (tp * pp)
    micro = {1: 4}.get(pp, 1) if tp < 8 else 1
    layout = Layout(pp=pp, dp_replicate=dp, tp=tp)
    tokens = batch * length / seconds / devices
    return Report(
        f"Megatron {name}",
        _MEGATRON,
        name,
        "a100-80",
        layout,
        "ddp",
        micro,
        batch // dp // micro,
        "full",
        tokens,
        sequence_length=length,
    )


_GPTS = {
    "gpt-1.7b": (2304, 24, 24),
    "gpt-7.5b": (4096, 36, 32),
    "gpt-18b": (6144, 40, 48),
    "gpt-39b": (8192, 48, 64),
    "gpt-145b": (12288, 80, 96),
}

REPORTS = (
    Report(
        "8B, 8 H100",
        _TITAN,
        "llama-3-8b",
        "h100-96",
        Layout(dp_shard=8),
        "fsdp",
        2,
        1,
        "selective",
        5762,
        82.4,
    ),
    Report(
        "8B, 128 H100",
        _TITAN,
        "llama-3-8b",
        "h100-96",
        Layout(dp_shard=128),
        "fsdp",
        2,
        1,
        "selective",
        5605,
        67.0,
    ),
    Report(
        "8B, 64 A100",
        _TITAN_A100,
        "llama-3-8b",
        "a100-80",
        Layout(dp_shard=64),
        "fsdp",
        1,
        1,
        "selective",
        2973,
    ),
    Report(
        "70B, 64 A100",
        _TITAN_A100,
        "llama-3-70b",
        "a100-80",
        Layout(dp_shard=64),
        "fsdp",
        1,
        1,
        "full",
        331,
    ),
    Report(
        "405B, 128 H100, tp 8",
        _TITAN_A100,
        "llama-3-405b",
        "h100-96",
        Layout(dp_shard=16, tp=8),
        "fsdp",
        2,
        1,
        "full",
        109,
    ),
    Report(
        "Llama 2 7B, 128 A100",
        _IBM,
        "llama-2-7b",
        "a100-80",
        Layout(dp_shard=128),
        "fsdp",
        2,
        1,
        "none",
        3700,
        sequence_length=4096,
    ),
    _megatron("gpt-1.7b", 32, 512, 1, 1, 137),
    _megatron("gpt-7.5b", 128, 512, 4, 1, 142),
    _megatron("gpt-18b", 256, 1024, 8, 1, 135),
    _megatron("gpt-39b", 512, 1536, 8, 2, 138),
    _megatron("gpt-145b", 1536, 2304, 8, 8, 148),
)


def _cluster(device: str, num_devices: int) -> Cluster:
    name = "h100" if device == "h100-96" else device
    nodes = max(1, num_devices // 8)
    found = cluster_from(ClusterFile(device=name, devices_per_node=8, nodes=nodes), name=device)
    if device == "h100-96" and found.device is not None:
        # as torchtitan describes theirs: 96 GB at 2.4 TB/s, held to 500 of 700 W
        slower = {k: v * 0.85 for k, v in found.device.flops.items()}
        own = replace(found.device, flops=slower, memory_bytes_per_s=2.4e12 * 0.8)
        found = replace(found, device=own, device_memory_bytes=94 * 2**30)
    return found


def _subject(report: Report) -> Subject:
    if report.model not in _GPTS:
        return from_architecture(report.model, report.sequence_length)
    width, layers, heads = _GPTS[report.model]

    def loss(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten())

    return Subject(
        report.model,
        lambda: GPT(width, layers, heads, 51200, 2048),
        loss,
        token_batch(51200, 2048),
        tokens_per_sample=2048,
    )


def compare() -> list[dict[str, Any]]:
    """Every report, both ways."""
    rows: list[dict[str, Any]] = []
    profilers: dict[tuple[str, int], Profiler] = {}
    for report in REPORTS:
        key = (report.model, report.sequence_length)
        if key not in profilers:
            profilers[key] = Profiler(_subject(report))
        said: dict[str, Any] = {"strategy": report.strategy, "recompute": report.recompute}
        candidate = Candidate(
            report.layout,
            micro_batch_size=report.micro_batch_size,
            accumulation=report.accumulation,
            precision="bf16",
            **said,
        )
        devices = report.layout.world_size
        found = estimate(profilers[key], candidate, _cluster(report.device, devices))
        tokens = (found.tokens_per_s or 0.0) / devices
        rows.append(
            {
                "report": asdict(report),
                "predicted_tokens_per_device_s": tokens,
                "error": tokens / report.tokens_per_device_s - 1.0,
                "predicted_memory_gib": found.memory.total / 2**30,
                "memory_error": None
                if report.memory_gib is None
                else found.memory.total / 2**30 / report.memory_gib - 1.0,
                "step_s": found.time.components(),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """For the documentation."""
    lines = [
        "| report | tokens/s per device: reported | predicted | error "
        "| memory GiB: reported | predicted | error | source |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        report = row["report"]
        reported, error = report["memory_gib"], row["memory_error"]
        lines.append(
            f"| {report['name']} | {report['tokens_per_device_s']:,.0f} "
            f"| {row['predicted_tokens_per_device_s']:,.0f} | {row['error']:+.0%} "
            f"| {'' if reported is None else reported} | {row['predicted_memory_gib']:.1f} "
            f"| {'' if error is None else f'{error:+.0%}'} | {report['source']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the raw comparison and the table."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    rows = compare()
    (folder / "published.json").write_text(json.dumps(rows, indent=1) + "\n")
    (folder / "published.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
