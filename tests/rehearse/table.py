"""Time and memory of rehearsals: `python -m tests.rehearse.table benchmarks/results/rehearse`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from drivetrain.core.text import readable_bytes
from drivetrain.rehearse.client import RehearsalRequest, rehearse
from drivetrain.rehearse.show import as_dict

EXAMPLES = Path(__file__).parents[2] / "examples"
FSDP = ("parallel.strategy=fsdp", "micro_batch_size=1")
CUT = (*FSDP, "parallel.tp=2", "parallel.pp=2")


@dataclass(frozen=True)
class Case:
    """One rehearsal."""

    name: str
    argv: tuple[str, ...]
    world_size: int
    batch: int
    """Samples a step."""

    @property
    def label(self) -> str:
        return f"{self.name.replace(' ', '-')}-{self.world_size}"


GPT = (str(EXAMPLES / "gpt.py"), *CUT)
LLAMA = (str(EXAMPLES / "llama.py"), "--length")
CASES = (
    *(Case("gpt", GPT, size, size // 2) for size in (8, 256, 4096)),  # two micro-batches per rank
    *(
        Case("llama 8b", (*LLAMA, "4096", "--size", "8b", *CUT), size, size // 2)
        for size in (8, 256, 4096)
    ),
    # the layout, the length and the batch of the published run
    Case(
        "llama 405b",
        (*LLAMA, "8192", "--size", "405b", *FSDP, "parallel.tp=8", "parallel.pp=16"),
        16_384,
        2_048,
    ),
    Case(
        "deepseek 671b",
        (
            *(str(EXAMPLES / "deepseek.py"), "--length", "4096", "--size", "671b"),
            *(*FSDP, "parallel.ep=64", "parallel.pp=16"),
        ),
        2_048,
        2_048,
    ),
)


def main(folder: str, only: tuple[str, ...] = ()) -> None:
    output = Path(folder)
    output.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        if only and case.label not in only:
            continue
        argv = (*case.argv, f"global_batch_size={case.batch}")
        made = as_dict(rehearse(RehearsalRequest(argv, case.world_size, timeout_s=3000)))
        made["script"][0] = Path(made["script"][0]).name
        for finding in made["findings"]:
            finding["file"] = finding["file"] and Path(finding["file"]).name
        (output / f"{case.label}.json").write_text(json.dumps(made, indent=1) + "\n")
        print(case.label, made["seconds"], readable_bytes(made["process_bytes"]), flush=True)
    write_table(output)


def write_table(output: Path) -> None:
    rows = [
        "| script | ranks | layout | rehearsed | seconds | memory of all processes | largest peak "
        "of a rank | found |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for path in sorted(
        output.glob("*.json"), key=lambda p: (p.stem.rpartition("-")[0], len(p.stem))
    ):
        made = json.loads(path.read_text())
        peak = max(rank["peak_bytes"] for rank in made["ranks"])
        rows.append(
            f"| {path.stem.rpartition('-')[0]} | {made['world_size']:,} | {made['layout']} | "
            f"{len(made['ranks'])} | {made['seconds']:.0f} | "
            f"{readable_bytes(made['process_bytes'])} | {readable_bytes(peak)} | "
            f"{len(made['findings']) or 'nothing'} |"
        )
    (output / "table.md").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], tuple(sys.argv[2:]))
