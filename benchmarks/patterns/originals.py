"""`python -m benchmarks.patterns.originals RESULTS SCRIPT …`: two known scripts as they are.

SCRIPT is train.py in a checkout of karpathy/nanoGPT, or transformers' run_clm_no_trainer.py. They
run as they are, tiny and on generated data, beside the same scripts with our changes (`patches/`):
on 1 and 2 processes, killed and resumed; nanoGPT's also as Accelerate and Lightning want it, on one
process.

nanoGPT's batches come in the same order everywhere. The other script draws its order from torch's
generator, which nobody else can repeat: there a step takes the whole data set.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.patterns import patching
from benchmarks.patterns.compare import Curve, distance
from benchmarks.patterns.running import ARMS, moved, original, prepare_processes
from benchmarks.patterns.script import run_watched
from benchmarks.patterns.table import curve, draw, verdicts

NANOGPT_WORDS = (
    *("--dataset=generated", "--compile=False", "--dtype=float32", "--eval_iters=0"),
    *("--eval_interval=1000", "--batch_size=4", "--gradient_accumulation_steps=4"),
    *("--block_size=32", "--n_layer=2", "--n_head=2", "--n_embd=32", "--max_iters=23"),
    *("--lr_decay_iters=24", "--warmup_iters=4", "--learning_rate=0.01", "--min_lr=0.001"),
)
CLM_WORDS = (
    *("--train_file", "train.txt", "--validation_file", "val.txt", "--config_name", "size"),
    *("--tokenizer_name", "tokenizer", "--block_size", "32", "--output_dir", "out"),
    *("--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "2"),
    *("--num_train_epochs", "20", "--learning_rate", "5e-3", "--weight_decay", "0.1"),
    *("--num_warmup_steps", "2", "--seed", "0"),
)


def nanogpt_place(folder: Path, source: Path, script: str) -> Path:
    """A folder with a train.py, what it imports, and bytes to learn."""
    data = folder / "data" / "generated"
    data.mkdir(parents=True)
    for name in ("model.py", "configurator.py"):
        shutil.copy(source / name, folder)
    (folder / "train.py").write_text(script)
    text = np.frombuffer(Path(os.__file__).read_bytes(), np.uint8).astype(np.uint16)
    text[:20_000].tofile(data / "train.bin")
    text[20_000:24_000].tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))
    return folder / "train.py"


def clm_place(folder: Path, script: str) -> Path:
    """A folder with the script, a tokenizer of 64 words, a size, and 16 blocks of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, PreTrainedTokenizerFast

    folder.mkdir(parents=True)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token=_FIRST))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = ["input_ids", "attention_mask"]
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words, unk_token=_FIRST, model_max_length=64, model_input_names=names
    ).save_pretrained(folder / "tokenizer")
    size = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    size.bos_token_id = size.eos_token_id = 0
    size.resid_pdrop = size.embd_pdrop = size.attn_pdrop = 0.0
    size.save_pretrained(folder / "size")
    draws = np.random.default_rng(0)
    for name in ("train", "val"):
        text = " ".join(f"w{i * i % 64}" for i in draws.integers(0, 64, 16 * 32))
        (folder / f"{name}.txt").write_text(text + "\n")
    (folder / "run_clm_no_trainer.py").write_text(script)
    return folder / "run_clm_no_trainer.py"


_FIRST = "w0"


def found_in(folder: Path) -> dict[str, float]:
    """What transformers' script leaves behind."""
    results = folder / "out" / "all_results.json"
    found: dict[str, float] = json.loads(results.read_text()) if results.exists() else {}
    return found


def run_clm(folder: str, script: str, words: Sequence[str]) -> None:
    """Its transformers' own: it asks Accelerate for a kind of device that is gone since 1.15."""
    from accelerate import DistributedType

    if not hasattr(DistributedType, "TPU"):
        DistributedType.TPU = "TPU"
    run_watched(folder, script, words)


def watched(script: Path, words: Sequence[str], run: Any = run_watched) -> Curve:
    printed = original(script, script.parent, words, run)
    return replace(printed, metrics=found_in(script.parent))


def arms_of(script: Any, folder: Path, words: Sequence[str]) -> dict[str, Any]:
    """Every arm; `script(folder)` makes its place."""
    arms: dict[str, Any] = {}
    for arm in ARMS:
        place = folder / arm.name.replace(", ", "-").replace(" ", "-")
        outcome = moved(arm, script(place), place, kill_at=13, words=words)
        curve = replace(outcome.curve, metrics=found_in(place))
        arms[arm.name] = {
            **asdict(curve),
            "resumed_at": outcome.resumed_at,
            "weights_sha256": outcome.weights_sha256,
        }
        print(f"{script.__name__}, {arm.name}", flush=True)
    return arms


def nanogpt(source: Path, folder: Path) -> dict[str, Any]:
    text, source = source.read_text(), source.parent
    patches = {name: patching.read(f"nanogpt-{name}") for name in NAMES}
    on_cpu = (*NANOGPT_WORDS, "--device=cpu")

    def ours(place: Path) -> Path:
        return nanogpt_place(place, source, patches["drivetrain"].apply(text))

    found = watched(nanogpt_place(folder / "original", source, text), on_cpu)
    others = {
        name: asdict(
            watched(nanogpt_place(folder / name, source, patches[name].apply(text)), on_cpu)
        )
        for name in ("accelerate", "lightning")
    }
    return {
        "script": patches["drivetrain"].source,
        "lines": {name: patch.counts for name, patch in patches.items()},
        "original": asdict(found),
        "arms": arms_of(ours, folder, NANOGPT_WORDS),
        "others": others,
    }


NAMES = ("drivetrain", "accelerate", "lightning")


def clm(source: Path, folder: Path) -> dict[str, Any]:
    text, patch = source.read_text(), patching.read("clm-drivetrain")

    def ours(place: Path) -> Path:
        return clm_place(place, patch.apply(text))

    found = watched(clm_place(folder / "original", text), CLM_WORDS, run_clm)
    return {
        "script": patch.source,
        "lines": {"drivetrain": patch.counts, "accelerate": (0, 0)},
        "original": asdict(found),
        "arms": arms_of(ours, folder, CLM_WORDS),
        "others": {},
    }


def table(results: dict[str, Any]) -> str:
    heads = ["script", "steps", *(arm.name for arm in ARMS), *NAMES[1:]]
    rows = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for result in results.values():
        before = curve(result["original"])
        others = [
            f"{distance(before, curve(result['others'][name])):.1e}"
            if name in result["others"]
            else "the original" * (result["lines"].get(name) == [0, 0])
            for name in NAMES[1:]
        ]
        cells = [result["script"], str(len(before.losses)), *verdicts(result), *others]
        rows.append(f"| {' | '.join(cells)} |")
    rows += ["", f"| lines changed | {' | '.join(NAMES)} |", "| --- " * 4 + "|"]
    for result in results.values():
        cells = [
            "-{} +{}".format(*result["lines"][name]) if name in result["lines"] else "not written"
            for name in NAMES
        ]
        rows.append(f"| {result['script']} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main(output: Path, scripts: list[Path]) -> None:
    output.mkdir(parents=True, exist_ok=True)
    kinds = {"train.py": nanogpt, "run_clm_no_trainer.py": clm}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HOME"] = f"{folder}/cache"
        prepare_processes()
        for script in scripts:
            measure = kinds[script.name]
            result = measure(script.resolve(), Path(folder) / measure.__name__)
            file = output / f"original-{measure.__name__}.json"
            file.write_text(json.dumps(result, indent=1) + "\n")
    files = {kind.__name__: output / f"original-{kind.__name__}.json" for kind in kinds.values()}
    results = {name: json.loads(f.read_text()) for name, f in files.items() if f.exists()}
    (output / "originals.md").write_text(table(results))
    drawn = {r["script"]: {**r, "arms": {**r["arms"], **r["others"]}} for r in results.values()}
    draw(drawn, output / "originals.png", columns=2)
    print(table(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]])
