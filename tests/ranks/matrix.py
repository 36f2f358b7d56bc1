"""The parity matrix: every layout against one process, and on from its checkpoint.

python -m tests.ranks.matrix docs/parity-matrix.md benchmarks/results/parity [MODEL ...]
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from drivetrain.testing import run_ranks
from drivetrain.train.trainer import Trainer
from tests.ranks.models import MODELS, task_of
from tests.ranks.training import largest_deviation

STEPS = 30
TOLERANCE = 1e-4
LOOSER = {"gpt_float8": 2e-2}
"""With 4 bits of mantissa, the last bit of fp32 occasionally decides between two values."""

Parallel = dict[str, Any]
Found = dict[str, dict[str, dict[str, float]]]
"""By model, kind and layout."""
FSDP = {"strategy": "fsdp"}


def pipeline(schedule: str, **more: Any) -> Parallel:
    return {"pp": 2, "pipeline": {"schedule": schedule}, **more}


def zero(stage: int, **more: Any) -> Parallel:
    return {"strategy": "deepspeed", "deepspeed": {"zero_stage": stage, **more}}


LAYOUTS: dict[str, tuple[int, Parallel]] = {
    "ddp": (2, {"strategy": "ddp"}),
    "fsdp": (2, FSDP),
    "hsdp": (4, {**FSDP, "dp_replicate": 2, "dp_shard": 2}),
    "tp": (2, {"tp": 2}),
    "tp+sp": (2, {"tp": 2, "tensor": {"sequence_parallel": True}}),
    "tp+loss": (2, {"tp": 2, "tensor": {"loss_parallel": True}}),
    "cp": (2, {**FSDP, "cp": 2}),
    "pp gpipe": (2, pipeline("gpipe")),
    "pp 1f1b": (2, pipeline("1f1b")),
    "pp interleaved": (2, pipeline("interleaved_1f1b")),
    "pp looped bfs": (2, pipeline("looped_bfs")),
    "pp zero bubble": (2, pipeline("zero_bubble")),
    "pp zbv": (2, pipeline("zbv")),
    "pp dualpipev": (2, pipeline("dualpipev")),
    "fsdp×tp": (4, {**FSDP, "tp": 2}),
    "fsdp×pp": (4, {**FSDP, "pp": 2}),
    "fsdp×pp interleaved": (4, pipeline("interleaved_1f1b", **FSDP)),
    "tp×pp": (4, {"tp": 2, "pp": 2}),
    "fsdp×cp": (4, {**FSDP, "cp": 2}),
    "ep": (2, {**FSDP, "ep": 2}),
    "ep×fsdp": (4, {**FSDP, "ep": 2}),
    "ep×hsdp": (4, {**FSDP, "ep": 2, "dp_replicate": 2, "dp_shard": 2}),
    "ep×tp": (4, {**FSDP, "ep": 2, "tp": 2}),
    "ep×pp": (4, {**FSDP, "ep": 2, "pp": 2}),
    "deepspeed 1": (2, zero(1)),
    "deepspeed 2": (2, zero(2)),
    "deepspeed 3": (2, zero(3)),
    "deepspeed 3 offloaded": (2, zero(3, offload_optimizer="cpu", offload_param="cpu")),
    "horovod": (2, {"strategy": "horovod"}),
    "parameter_server": (2, {"strategy": "parameter_server"}),
}

NOT_HANDED_OVER = ("parameter_server",)
"""From and to it is another training, unless it is synchronous: that has to be accepted."""

HAS_HOROVOD = find_spec("horovod") is not None
"""`make horovod` builds it; without it the row stays as it was measured."""

NOT_FOR = {
    "resnet": ("tp", "cp"),
    "gpt_muon": (
        "deepspeed",
        "horovod",
        "parameter_server",
    ),  # they step one optimizer, and Muon comes with AdamW
    "hf_gpt2": ("tp",),  # its layers are Conv1D with q, k and v in one, and it has no tp_plan
}


# of models with experts, those that spread them, and those to resume under
WITH_EXPERTS = ("fsdp", "hsdp", "ep", "ep×fsdp", "ep×hsdp", "ep×tp", "ep×pp")
ONLY = {
    "moe": WITH_EXPERTS,
    "hf_mixtral": WITH_EXPERTS[:-1],  # its balance loss is over all layers, of all stages
    "hf_qwen_moe": ("fsdp", "ep", "ep×fsdp", "ep×pp"),  # its tp_plan names layers it has not
    "gpt_float8": ("ddp", "fsdp", "hsdp", "pp gpipe", "pp 1f1b", "fsdp×pp"),  # tp is refused
    # tp's plan and cp's position_ids are refused: peft wraps the model that has them
    "llama_lora": ("ddp", "fsdp", "hsdp", "pp gpipe", "pp 1f1b", "fsdp×pp"),
}


def applies(model: str, layout: str) -> bool:
    if layout == "horovod" and not HAS_HOROVOD:
        return False
    if model in ONLY:
        return layout in ONLY[model]
    return not layout.startswith("ep") and not any(
        axis in layout for axis in NOT_FOR.get(model, ())
    )


def config(output_dir: str, steps: int, parallel: Parallel, **more: Any) -> dict[str, Any]:
    return {
        "global_batch_size": 16,
        "micro_batch_size": 2,
        "max_steps": steps,
        "output_dir": output_dir,
        "parallel": parallel,
        "optimization": {"learning_rate": 2e-3, "max_grad_norm": 1.0},
        "record": {"progress": "none", "sinks": [], "logging_steps": 5},
        "checkpoint": {"every_steps": None},
        **more,
    }


def train(
    model: str, output_dir: str, parallel: Parallel, steps: int = STEPS, **checkpoint: Any
) -> tuple[list[float], str]:
    task, data = task_of(model)
    more: dict[str, Any] = {"checkpoint": {"every_steps": None, **checkpoint}}
    if model == "gpt_float8":
        more["precision"] = {"float8": "rowwise"}
    trainer = Trainer(task, config(output_dir, steps, parallel, **more))
    history = trainer.fit(data)
    return history.losses, str(history.run_dir)


def train_in_turn(
    output_dir: str, cells: list[tuple[str, str, Parallel]], steps: int = STEPS
) -> dict[str, list[float]]:
    """Cells (name, model, parallel) one after the other in one world: ranks are started once."""
    return {name: train(model, output_dir, parallel, steps)[0] for name, model, parallel in cells}


def hand_over(
    output_dir: str, model: str, chain: list[tuple[str, Parallel]], steps: int = STEPS
) -> dict[str, list[float]]:
    """Half a run under each layout, and the other half, from its checkpoint, under the next."""
    results, half = {}, steps // 2
    for (name, first), (other, then) in zip(chain, chain[1:] + chain[:1], strict=True):
        losses, folder = train(model, output_dir, first, half, every_steps=half)
        rest, _ = train(model, output_dir, then, steps, resume_from=folder)
        results[f"{name} → {other}"] = losses + rest
    return results


def alone(model: str, output_dir: str, steps: int = STEPS) -> list[float]:
    """What one process trains."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    losses, _ = train(model, output_dir, {}, steps)
    torch.set_num_threads(threads)
    assert len(losses) == steps
    assert losses[-1] < losses[0]
    return losses


def measure(model: str) -> dict[str, dict[str, float]]:
    """Deviations over all steps, and of a run that is handed over half-way."""
    folder = tempfile.mkdtemp(prefix="parity-")
    reference = alone(model, folder)
    found: dict[str, dict[str, float]] = {"steps": {}, "handed over": {}}
    for world_size in (2, 4):
        chain = [
            (name, parallel)
            for name, (ranks, parallel) in LAYOUTS.items()
            if ranks == world_size and applies(model, name)
        ]
        cells = [(name, model, parallel) for name, parallel in chain]
        for name, losses in run_ranks(train_in_turn, world_size, 1500, args=(folder, cells))[
            0
        ].items():
            found["steps"][name] = largest_deviation(losses, reference)
        chain = [each for each in chain if each[0] not in NOT_HANDED_OVER]
        for name, losses in run_ranks(hand_over, world_size, 1500, args=(folder, model, chain))[
            0
        ].items():
            found["handed over"][name] = largest_deviation(losses, reference)
    return found


def page(found: Found) -> str:
    """The table for people."""
    lines = [
        "# Parity matrix",
        "",
        "The largest relative deviation of each layout's loss from that of one process, over "
        f"{STEPS} steps with real ranks (fp32, CPU, gloo). Allowed: {TOLERANCE:.0e}, and "
        + ", ".join(f"{allowed:.0e} for {model}" for model, allowed in LOOSER.items())
        + ". The models have no dropout, and every sample has the same shape. Written by "
        "`make matrix`.",
        "",
        f"| layout | ranks | {' | '.join(found)} |",
        f"| --- | ---: |{' ---: |' * len(found)}",
    ]
    for name, (ranks, _) in LAYOUTS.items():
        cells = [found[model]["steps"].get(name) for model in found]
        shown = " | ".join("n/a" if value is None else f"{value:.1e}" for value in cells)
        lines.append(f"| {name} | {ranks} | {shown} |")
    lines += [
        "",
        f"Runs saved after {STEPS // 2} steps in one layout and resumed in another:",
        "",
    ]
    for model, values in found.items():
        lines += [
            f"- {model}: " + "; ".join(f"{n} {v:.1e}" for n, v in values["handed over"].items())
        ]
    lines += [
        "",
        "n/a: a ResNet has no layers or sequences for tensor and context parallelism. GPT-2's "
        "layers in transformers are Conv1D with q, k and v in one weight, which cannot be sharded. "
        "DeepSpeed, Horovod and parameter servers step one optimizer, but Muon is combined with "
        "AdamW. ep is for models with experts (moe, hf_mixtral, hf_qwen_moe), which were tested "
        "with distributed experts and under fsdp. hf_mixtral is trained with its balance loss, "
        "which pp refuses. gpt_float8 is the gpt with `precision.float8: rowwise`: with 4 bits of "
        "mantissa, a difference in the last bit of fp32 occasionally moves a value to the next "
        "float8 number; tp refuses it. llama_lora is a frozen hf_llama with a peft adapter; tp "
        "and cp refuse peft's wrapper.",
        "",
        "The ResNet's activation is SiLU. With ReLU, whose slope is discontinuous at 0, one "
        "process deviates from itself by 3e-4 within 20 steps if it sums the same gradients in "
        "another order, so differences between layouts could not be distinguished from that.",
    ]
    return "\n".join(lines) + "\n"


def main(target: str, results: str, *only: str) -> None:
    """All models, or those named beside what is there; exit 1 when one parts."""
    path = Path(results) / "deviations.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    found: Found = json.loads(path.read_text()) if only and path.exists() else {}
    for model in only or MODELS:  # what is there is kept, should a later one fail
        found[model] = measure(model)
        found = {name: found[name] for name in MODELS if name in found}
        path.write_text(json.dumps(found, indent=1) + "\n")
        Path(target).write_text(page(found))
    has_parted = False
    for model, kinds in found.items():
        worst = max(value for kind in kinds.values() for value in kind.values())
        allowed = LOOSER.get(model, TOLERANCE)
        print(f"{model}: largest deviation {worst:.1e}, allowed {allowed:.0e}")
        has_parted |= worst > allowed
    sys.exit(1 if has_parted else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
