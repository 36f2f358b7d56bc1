"""`python -m tests.streams.table RESULTS DOCS [KIND …]`: every stream and sampler, counted.

Each kind of stream is read by 1, 2 and 3 ranks, with 0 and 2 loader processes each: to the end;
killed (SIGKILL, in the second epoch) and resumed; and killed and resumed by another number of
ranks. Every use of every sample is counted by its number. All must be exact, or refused.

Samplers train on 1, 2, 3 and 4 ranks, and every micro-batch of every step is compared.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.streams import sampler_kinds
from tests.streams.kinds import KINDS, NUM_SAMPLES, Kind, make_files, make_tar_files
from tests.streams.running import KILLED_AT, Step, live, train, used_in, verdict

RANKS, WORKERS = (1, 2, 3), (0, 2)
SAMPLER_RANKS = (1, 2, 3, 4)
WAYS = ("to the end", "killed and resumed", "killed and resumed by others")
BEGIN, END = "<!-- {} -->", "<!-- end of {} -->"
Cells = dict[str, dict[str, str]]


def body(name: str, folder: str, workers: int, run: str, killed_at: int | None) -> None:
    import multiprocessing

    multiprocessing.set_start_method("fork", force=True)
    kind = next(kind for kind in KINDS if kind.name == name)
    data = {"num_workers": workers, **kind.data}
    train(lambda: kind.make(Path(folder)), run, {"data": data}, killed_at)


def outcomes(kind: Kind, files: Path, run: Path, ranks: int, workers: int) -> Iterator[str]:
    """For each way: exact, refused: …, or WRONG: …"""
    args = (kind.name, str(files), workers)
    whole, cut, others = (str(run / name) for name in ("whole", "cut", "others"))
    names, problem = live(body, args, whole, ranks, None)
    yield f"refused: {problem}" if problem else verdict(used_in(whole, [names]), NUM_SAMPLES)
    names, problem = live(body, args, cut, ranks, KILLED_AT)
    if problem:
        yield from [f"refused: {problem}"] * 2
        return
    shutil.copytree(cut, others)
    for place, number in ((cut, ranks), (others, ranks % len(RANKS) + 1)):
        more, problem = live(body, args, place, number, None)
        used = used_in(place, [names, more])
        yield f"refused: {problem}" if problem else verdict(used, NUM_SAMPLES)


def streams(folder: Path, chosen: list[int]) -> Cells:
    files = folder / "files"
    make_files(files)
    make_tar_files(files)
    found: Cells = {}
    for number in chosen:
        kind = KINDS[number]
        cells = found[kind.name] = {}
        for ranks in RANKS:
            for workers in WORKERS:
                run = folder / f"{number}-{ranks}-{workers}"
                told = outcomes(kind, files, run, ranks, workers)
                for way, text in zip(WAYS, told, strict=True):
                    cells[f"{way}, {ranks} ranks, {workers} workers"] = text
                    print(
                        kind.name, way, ranks, workers, text.splitlines()[0], sep=" | ", flush=True
                    )
    return found


# Samplers


def sampler_body(name: str, run: str, killed_at: int | None) -> None:
    kinds = [*sampler_kinds.KINDS, *sampler_kinds.RANK_KINDS]
    make = next(kind.make for kind in kinds if kind.name == name)
    train(make, run, {}, killed_at)


def samplers(folder: Path) -> tuple[Cells, dict[str, str]]:
    """Whether ranks see the same batches; and the share of a rare class, drawn and weighted."""
    found: Cells = {}
    shares: dict[str, str] = {}
    for number, kind in enumerate([*sampler_kinds.KINDS, *sampler_kinds.RANK_KINDS]):
        cells = found[kind.name] = {}
        alone: dict[int, Step] = {}
        for ranks in SAMPLER_RANKS:
            run = str(folder / f"sampler-{number}-{ranks}")
            names, problem = live(sampler_body, (kind.name,), run, ranks, None)
            steps = used_in(run, [names]) if names else {}
            alone = alone or steps
            same = "the same batches" if steps == alone else "WRONG: other batches"
            cells[f"{ranks} ranks"] = f"refused: {problem}" if problem else same
            print(kind.name, ranks, cells[f"{ranks} ranks"].splitlines()[0], sep=" | ", flush=True)
            if number == 0:
                ids = [i for _, turns in steps.values() for _, *numbers in turns for i in numbers]
                share = sampler_kinds.IS_RARE[torch.tensor(ids)].double().mean()
                shares[f"{ranks} ranks"] = f"{share:.1%} of {len(ids)}"
    return found, shares


# The page


def streams_table(found: Cells) -> str:
    """A row per kind, a column per way."""
    lines = ["| stream | " + " | ".join(WAYS) + " |", "| --- |" + " --- |" * len(WAYS)]
    for name, cells in found.items():
        told = []
        for way in WAYS:
            runs = {
                c.removeprefix(f"{way}, "): t for c, t in cells.items() if c.startswith(f"{way},")
            }
            told.append(_summary(runs))
        lines.append(f"| {name} | " + " | ".join(told) + " |")
    return "\n".join(lines) + "\n"


def _summary(runs: dict[str, str]) -> str:
    by_word: dict[str, list[str]] = {}
    for cell, text in runs.items():
        by_word.setdefault(text.partition(":")[0], []).append(cell)
    if len(by_word) == 1:
        return next(iter(by_word))
    refused_on = sorted({cell.split()[0] for cell in by_word.get("refused", [])})
    on_all_workers = len(by_word.get("refused", [])) == len(WORKERS) * len(refused_on)
    if set(by_word) == {"exact", "refused"} and on_all_workers:
        exact_on = sorted({cell.split()[0] for cell in by_word["exact"]})
        ranks = "rank" if exact_on == ["1"] else "ranks"
        return f"exact on {', '.join(exact_on)} {ranks}, refused on {', '.join(refused_on)}"
    few, many = sorted(by_word, key=lambda word: len(by_word[word]))[:: len(by_word) - 1]
    return f"{few} on {' and '.join(by_word[few])}, else {many}"


def samplers_table(found: Cells, shares: dict[str, str]) -> str:
    """A row per kind, a column per number of ranks."""
    heads = [f"{ranks} rank{'s' if ranks > 1 else ''}" for ranks in SAMPLER_RANKS]
    lines = ["| sampler | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(heads)]
    for name, cells in found.items():
        words = [text.partition(":")[0] for text in cells.values()]
        lines.append(f"| {name} | " + " | ".join(words) + " |")
    lines.append("| rare class, 10 % of the data, balanced | " + " | ".join(shares.values()) + " |")
    return "\n".join(lines) + "\n"


def write(path: Path, name: str, text: str) -> None:
    begin, end = BEGIN.format(name), END.format(name)
    head, _, rest = path.read_text().partition(begin)
    path.write_text(f"{head}{begin}\n{text}{end}{rest.partition(end)[2]}")


def main(results: Path, docs: Path, chosen: list[int]) -> int:
    """Only the streams of these numbers, where some are given; the others as they are known."""
    results.mkdir(parents=True, exist_ok=True)
    saved = results / "outcomes.json"
    known: dict[str, Any] = json.loads(saved.read_text()) if saved.exists() else {"streams": {}}
    with tempfile.TemporaryDirectory() as folder:
        known["streams"] |= streams(Path(folder), chosen or list(range(len(KINDS))))
        if not chosen:
            known["samplers"], known["shares"] = samplers(Path(folder))
    known["streams"] = {kind.name: known["streams"][kind.name] for kind in KINDS}
    saved.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    write(docs, "streams", streams_table(known["streams"]))
    write(docs, "samplers", samplers_table(known["samplers"], known["shares"]))
    return int("WRONG" in json.dumps(known))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), [int(word) for word in sys.argv[3:]]))
