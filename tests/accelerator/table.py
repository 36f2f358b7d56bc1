"""The layouts on the test accelerator, next to the CPU: `make device-matrix` writes the page.

python -m tests.accelerator.table docs/device-matrix.md benchmarks/results/device-matrix
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from drivetrain.testing import run_ranks
from tests.accelerator.layouts import GROUPS, STEPS, layouts_of, train_on_device
from tests.accelerator.reference import losses_on_cpu
from tests.accelerator.test_parity import PARITY, synchronizations
from tests.ranks.matrix import LAYOUTS, LOOSER, applies
from tests.ranks.training import largest_deviation

MODELS = ("gpt", "resnet", "hf_llama", "moe", "gpt_muon", "gpt_float8", "llama_lora")
SETTINGS = [("both", 0), ("device only", 0), ("both", 3), ("device only", 3)]
"""Process group, and the first rank's device; the other models take the first and the last."""
WAITING = ("parameter_server",)
"""Whose servers are on the host; so are the counts of tokens that go to experts."""
Found = dict[str, dict[str, Any]]


def measure(folder: str, world_size: int) -> Found:
    layouts = layouts_of(world_size)
    counted = [name for name in layouts if applies("gpt", name) and name not in WAITING]
    waits = run_ranks(synchronizations, world_size, 600, (folder, counted), GROUPS["both"])
    found: Found = {layout: {"ranks": world_size} for layout in layouts}
    for layout in counted:
        found[layout]["waits"] = max(len(rank[layout]) for rank in waits)
    for group, shift in SETTINGS:
        models = MODELS if (group, shift) in (SETTINGS[0], SETTINGS[-1]) else MODELS[:1]
        cells = [(name, model) for name in layouts for model in models if applies(model, name)]
        print(
            f"{world_size} ranks, {group}, from device {shift}: {len(cells)} trainings", flush=True
        )
        backend = GROUPS[group]
        losses = run_ranks(train_on_device, world_size, 3000, (folder, cells, shift), backend)[0]
        for layout, model in cells:
            deviation = largest_deviation(losses[f"{layout}, {model}"], losses_on_cpu(model, STEPS))
            row = found[layout].setdefault(model, {})
            row[f"{group}, {shift}"] = deviation
    return found


def page(found: Found) -> str:
    lines = [
        "# Layouts on the test accelerator",
        "",
        "Each layout of the [parity matrix](parity-matrix.md) that torch itself implements, "
        "trained on the [test accelerator](gpu.md). The table shows the largest relative deviation "
        f"of the loss from one process on the CPU over {STEPS} steps, in fp32 (allowed: "
        f"{PARITY:.0e}, and {LOOSER['gpt_float8']:.0e} for gpt_float8), in the worst of four "
        "settings: a process group for host and device tensors or for device tensors only, and "
        "device indices that start at 0 or at 3. *Waits* are host synchronizations in five "
        "steps between two logs. Written by `make device-matrix`.",
        "",
        f"| layout | ranks | {' | '.join(MODELS)} | waits |",
        f"| --- | ---: |{' ---: |' * len(MODELS)} ---: |",
    ]
    for layout, row in found.items():
        cells = [f"{max(row[model].values()):.1e}" if model in row else "n/a" for model in MODELS]
        waits = row.get("waits", "n/a")
        lines.append(f"| {layout} | {row['ranks']} | {' | '.join(cells)} | {waits} |")
    lines += [
        "",
        "n/a: as in the parity matrix, which also describes the models. Ranks with a parameter "
        "server or with distributed experts wait for the host by design.",
        "DeepSpeed and Horovod have their own kernels for each device, and are not run on this "
        "one.",
    ]
    return "\n".join(lines) + "\n"


def main(target: str, results: str) -> None:
    folder = tempfile.mkdtemp(prefix="device-matrix-")
    found = {name: row for size in (2, 4) for name, row in measure(folder, size).items()}
    found = {name: found[name] for name in LAYOUTS if name in found}
    Path(results).mkdir(parents=True, exist_ok=True)
    Path(results, "deviations.json").write_text(json.dumps(found, indent=1) + "\n")
    Path(target).write_text(page(found))
    beyond = [
        f"{layout}, {model}"
        for layout, row in found.items()
        for model in MODELS
        if max(row.get(model, {"": 0.0}).values()) > LOOSER.get(model, PARITY)
    ]
    waits = sum(row.get("waits", 0) for row in found.values())
    print(f"{beyond or 'nothing'} beyond what is allowed; {waits} waits")
    sys.exit(1 if beyond or waits else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
