"""Time and memory of rehearsals: `python -m tests.rehearse.table benchmarks/results/rehearse`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from drivetrain.core.text import readable_bytes
from drivetrain.rehearse.client import RehearsalRequest, rehearse
from drivetrain.rehearse.show import as_dict

EXAMPLES = Path(__file__).parents[2] / "examples"
FSDP = ("parallel.strategy=fsdp", "parallel.tp=2", "parallel.pp=2", "micro_batch_size=1")
SCRIPTS = {
    "gpt": (str(EXAMPLES / "gpt.py"), *FSDP),
    "llama 8b": (str(EXAMPLES / "llama.py"), "--size", "8b", "--length", "4096", *FSDP),
}


def main(folder: str, only: tuple[str, ...] = ()) -> None:
    output = Path(folder)
    output.mkdir(parents=True, exist_ok=True)
    for name, words in SCRIPTS.items():
        for world_size in (8, 256, 4096):
            label = f"{name.replace(' ', '-')}-{world_size}"
            if only and label not in only:
                continue
            batch = f"global_batch_size={world_size // 2}"  # two micro-batches per rank
            made = as_dict(rehearse(RehearsalRequest((*words, batch), world_size, timeout_s=3000)))
            made["script"][0] = Path(made["script"][0]).name
            for finding in made["findings"]:
                finding["file"] = finding["file"] and Path(finding["file"]).name
            (output / f"{label}.json").write_text(json.dumps(made, indent=1) + "\n")
            print(label, made["seconds"], readable_bytes(made["process_bytes"]), flush=True)
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
