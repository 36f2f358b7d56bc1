"""Predictions next to public training reports: `python -m benchmarks.plan.published FOLDER`.

Each report's own layout, micro-batch and recomputation are priced; nothing is searched and nothing
fitted. Their programs are not ours (compiled or fused kernels, other losses), and their clusters
are known only as far as they say.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from benchmarks.plan.models import GPT
from benchmarks.plan.reports import DECODERS, H100_500W, REPORTS, Report
from drivetrain.cluster.description import Cluster
from drivetrain.cluster.file import ClusterFile, cluster_from
from drivetrain.plan.candidate import Candidate
from drivetrain.plan.cost.estimate import estimate
from drivetrain.plan.profile.profiling import Profiler
from drivetrain.plan.profile.sources import from_architecture
from drivetrain.plan.profile.subject import Subject, token_batch


def _cluster(device: str, num_devices: int) -> Cluster:
    name = "h100" if device == H100_500W else device
    nodes = max(1, num_devices // 8)
    found = cluster_from(ClusterFile(device=name, devices_per_node=8, nodes=nodes), name=device)
    if device == H100_500W and found.device is not None:
        slower = {k: v * 0.85 for k, v in found.device.flops.items()}
        own = replace(found.device, flops=slower, memory_bytes_per_s=2.4e12 * 0.8)
        found = replace(found, device=own, device_memory_bytes=94 * 2**30)
    return found


def _subject(report: Report) -> Subject:
    if report.model not in DECODERS:
        return from_architecture(report.model, report.sequence_length)
    decoder, length = DECODERS[report.model], report.sequence_length

    def loss(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten())

    return Subject(
        report.model,
        lambda: GPT(decoder.width, decoder.layers, decoder.heads, decoder.vocabulary, length),
        loss,
        token_batch(decoder.vocabulary, length),
        tokens_per_sample=length,
    )


def _candidate(report: Report) -> Candidate:
    return Candidate(
        report.layout,
        "fsdp",
        micro_batch_size=report.micro_batch_size,
        accumulation=report.accumulation,
        precision="bf16",
        recompute=report.recompute,  # type: ignore[arg-type]  # a word of the table
        sequence_parallel=report.shares_sequences,
    )


def compare() -> list[dict[str, Any]]:
    """Every report with its prediction."""
    profilers: dict[tuple[str, int], Profiler] = {}
    rows = []
    for report in REPORTS:
        key = (report.model, report.sequence_length)
        if key not in profilers:
            profilers[key] = Profiler(_subject(report))
        devices = report.layout.world_size
        cluster = _cluster(report.device, devices)
        found = estimate(profilers[key], _candidate(report), cluster)
        tokens = (found.tokens_per_s or 0.0) / devices
        memory = found.memory.total / 2**30
        rows.append(
            {
                "report": asdict(report),
                "predicted_tokens_per_device_s": tokens,
                "error": tokens / report.tokens_per_device_s - 1.0,
                "predicted_memory_gib": memory,
                "memory_error": report.memory_gib and memory / report.memory_gib - 1.0,
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
            f"| {report['name']}{' (compiled)' if report['is_compiled'] else ''} "
            f"| {report['tokens_per_device_s']:,.0f} "
            f"| {row['predicted_tokens_per_device_s']:,.0f} | {row['error']:+.0%} "
            f"| {'' if reported is None else reported} | {row['predicted_memory_gib']:.1f} "
            f"| {'' if error is None else f'{error:+.0%}'} | {report['source']} |"
        )
    errors = [row["error"] for row in rows]
    middle = statistics.median(map(abs, errors))
    lines += ["", f"median error {middle:.0%}, from {min(errors):+.0%} to {max(errors):+.0%}"]
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
