"""Every example runs, as its own first lines say."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCH = ("-m", "drivetrain", "train", "--nproc-per-node=2", "--spares=0")
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


def run(tmp_path: Path, *words: str) -> str:
    result = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=tmp_path,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def last_loss(output: str, steps: int = 20) -> str:
    (line,) = [line for line in output.splitlines() if line.startswith(f"step {steps}/{steps}")]
    return line.split("loss ")[1].split()[0]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["digits.py", "gpt.py"])
def test_the_quick_start_shows_the_same_loss_on_1_2_and_4_processes(
    tmp_path: Path, name: str
) -> None:
    script, steps = str(EXAMPLES / name), ["max_steps=20", "evaluation.every_steps=20"]
    losses = [last_loss(run(tmp_path, script, *steps))]
    for num in ("2", "4"):
        words = ["-m", "drivetrain", "train", script, "--nproc-per-node", num]
        losses.append(last_loss(run(tmp_path, *words, *steps)))
    assert losses[0] == losses[1] == losses[2]


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    words = ["-m", "drivetrain", "train", "--nproc-per-node", "2", "--run-dir", "run"]
    output = run(tmp_path, *words, str(EXAMPLES / "keep_your_loop.py"))
    assert output.count("120 steps, last loss") == 1
    assert output.count("evaluated 297 of 297") == 5, "once an epoch"
    assert (tmp_path / "run" / "checkpoints" / "weights.pt").exists()
    again = run(tmp_path, *words, str(EXAMPLES / "keep_your_loop.py"))
    assert "resumed: after step 120" in again, "nothing is left to do, and its history is empty"
    assert "last loss" not in again


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["gan", "clip"])
def test_several_models_and_losses_over_the_batch_of_all_ranks(tmp_path: Path, name: str) -> None:
    script = str(EXAMPLES / f"{name}.py")
    words = [*LAUNCH, script, "max_steps=4", "record.logging_steps=4", "evaluation.every_steps=4"]
    assert float(last_loss(run(tmp_path, *words), 4)) < 10


@pytest.mark.slow
@pytest.mark.long
def test_every_collective_shows_what_it_does(tmp_path: Path) -> None:
    launch = ["-m", "drivetrain", "train", "--nproc-per-node=4", "--spares=0"]
    output = run(tmp_path, *launch, str(EXAMPLES / "collectives.py"))
    shown = {part.split(":")[0]: part for part in output.strip().split("\n\n")}
    assert "rank 3: [30, 31, 32, 33]   -> [60, 64, 68, 72]" in shown["all_reduce"]
    assert "rank 3: [30, 31, 32, 33]   -> [3, 13, 23, 33]" in shown["all_to_all"]
    assert "rank 3: [4]                -> []" in shown["gather"]
    assert {"broadcast from rank 2", "reduce_scatter", "barrier"} <= shown.keys()


@pytest.mark.slow
@pytest.mark.long  # a shorter one is in test_train_verb.py
def test_the_drop_in_trainer(tmp_path: Path) -> None:
    output = run(tmp_path, str(EXAMPLES / "ddp_drop_in.py"))
    assert output.count("best accuracy 0.9") == 1
    assert (tmp_path / "runs" / "saved" / "weights.pt").exists()


@pytest.mark.slow
@pytest.mark.long  # each strategy has tests of its own
@pytest.mark.parametrize(
    "config",
    sorted((EXAMPLES / "configs").glob("*.yaml")),
    ids=lambda p: p.stem,
)
def test_the_gpt_under_every_config(tmp_path: Path, config: Path) -> None:
    words = [*LAUNCH, str(EXAMPLES / "gpt.py")]
    steps = ["max_steps=10", "evaluation.every_steps=10"]
    output = run(tmp_path, *words, "--config", str(config), *steps)
    assert 2.0 < float(last_loss(output, 10)) < 4.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("resnet", "parallel.strategy=fsdp"), marks=pytest.mark.long),
        pytest.param(("vit", "parallel.tp=2"), marks=pytest.mark.long),
    ],
    ids=lambda words: words[0],
)
def test_images_alone_and_shared_show_the_same_loss(tmp_path: Path, words: tuple[str, str]) -> None:
    model, setting = words
    script = [str(EXAMPLES / "vision.py"), "--model", model]
    steps = ["max_steps=6", "evaluation.every_steps=6"]
    alone = last_loss(run(tmp_path, *script, *steps), 6)
    assert last_loss(run(tmp_path, *LAUNCH, *script, setting, *steps), 6) == alone


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="pip install drivetrain[deepspeed]")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(name, marks=pytest.mark.long)
        for name in ("zero3-offload", "zero1", "zero2", "zero3")
    ],
)
def test_the_deepspeed_example(tmp_path: Path, settings: str) -> None:
    folder = EXAMPLES / "deepspeed"
    words = [*LAUNCH, str(folder / "train.py")]
    file = f"parallel.deepspeed.config={folder / settings}.json"
    output = run(tmp_path, *words, file, "max_steps=20", "num_train_epochs=null")
    assert last_loss(output)


@pytest.mark.slow
@pytest.mark.long
def test_a_language_model_from_text_to_a_sample(tmp_path: Path) -> None:
    """A folder of text becomes tokens, a run and a sample."""
    pytest.importorskip("tokenizers")
    folder, text = EXAMPLES / "applications/language", str(EXAMPLES.parent / "docs")
    prepared = run(tmp_path, str(folder / "prepare.py"), "--text", text, "--glob", "*.md")
    assert "val: " in prepared
    few = ["max_steps=2", "optimization.warmup_steps=0", "optimization.decay_steps=1"]
    words = [*LAUNCH, "--run-dir=run", str(folder / "train.py"), *few, "evaluation.max_samples=16"]
    output = run(tmp_path, *words)
    assert "step 2/2" in output
    sampled = run(tmp_path, str(folder / "sample.py"), "run", "The run")
    assert sampled.startswith("The run")


@pytest.mark.slow
@pytest.mark.long
def test_a_base_an_adapter_and_what_transformers_makes_of_them(tmp_path: Path) -> None:
    """Plain transformers finds the losses that the runs wrote down, before and after."""
    pytest.importorskip("peft")
    folder, text = EXAMPLES / "applications/finetuning", str(EXAMPLES.parent / "docs")
    prepare = [str(folder.parent / "language/prepare.py"), "--text", text, "--glob", "*.md"]
    run(tmp_path, *prepare, "--without", "p*", "--out", "data/kernel")
    same = ["--tokenizer", "data/kernel/tokenizer.json"]
    run(tmp_path, *prepare, "--only", "p*", *same, "--out", "data/hwmon")
    few = ["max_steps=6", "evaluation.every_steps=6", "optimization.warmup_steps=0"]
    base = [str(folder / "pretrain.py"), *few, "optimization.decay_steps=1"]
    before = evaluated(run(tmp_path, *LAUNCH, "--run-dir=base", *base))
    adapter = [str(folder / "finetune.py"), *few, "parallel.strategy=fsdp"]
    launched = [*LAUNCH, "--run-dir=tuned", *adapter, "model.pretrained=base/model"]
    after = evaluated(run(tmp_path, *launched))
    table = run(tmp_path, str(folder / "evaluate.py"), "base/model", "tuned").splitlines()
    found = {line[:14].strip(): [float(x) for x in line[14:].split()] for line in table[1:4]}
    assert found["base"] == pytest.approx(before, abs=2e-4)
    assert found["merged"] == pytest.approx(after, abs=2e-4)
    assert found["base + adapter"] == pytest.approx(after, abs=2e-4)
    assert after[1] < before[1] - 0.02
    sizes = [
        (tmp_path / name).stat().st_size
        for name in ("tuned/adapter/adapter_model.safetensors", "base/model/model.safetensors")
    ]
    assert sizes[0] < 0.1 * sizes[1]


def evaluated(output: str) -> list[float]:
    """The last losses on the old text and on the new one."""
    lines = [line for line in output.splitlines() if " evaluated " in line]
    return [float(line.split("loss ")[1].split()[0]) for line in lines[-2:]]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("model", ["resnet18", "resnet50", "vit"])
def test_images_from_folders(tmp_path: Path, model: str) -> None:
    """Pictures of any shape become squares, and both ranks count every one of them once."""
    folder = EXAMPLES / "applications/images"
    run(tmp_path, str(folder / "data.py"), "pictures")
    words = ["--model", model, "--width", "16", "--pictures", "pictures", "--size", "32"]
    few = ["global_batch_size=32", "num_train_epochs=2"]
    output = run(tmp_path, *LAUNCH, "--run-dir=run", str(folder / "train.py"), *words, *few)
    assert "evaluated 48 of 48" in output
    assert "top5" in output


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "parameter_server"])
def test_a_recommender_learns(tmp_path: Path, strategy: str) -> None:
    script = EXAMPLES / "applications/recommender/train.py"
    few = ["num_train_epochs=1", f"parallel.strategy={strategy}"]
    output = run(tmp_path, *LAUNCH, "--run-dir=run", str(script), *few)
    assert float(output.split("auroc")[-1].split()[0]) == pytest.approx(0.71, abs=0.02)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not FASHION_MNIST.exists(), reason="apt-get install dataset-fashion-mnist")
def test_pairs_of_all_ranks_are_one_batch(tmp_path: Path) -> None:
    """The loss of the first steps is that of one process; over a rank's own pairs it is lower."""
    script = str(EXAMPLES / "applications/contrastive/train.py")
    losses = {}
    for ranks, negatives in (("1", "all"), ("2", "all"), ("2", "own")):
        launch = [*LAUNCH[:3], f"--nproc-per-node={ranks}", f"--run-dir={negatives}-{ranks}"]
        few = ["--negatives", negatives, "max_steps=20", "optimization.warmup_steps=5"]
        output = run(tmp_path, *launch, script, *few, "record.logging_steps=20")
        losses[ranks, negatives] = float(last_loss(output))
    assert losses["2", "all"] == pytest.approx(losses["1", "all"], rel=1e-3)
    assert losses["2", "own"] < 0.9 * losses["1", "all"]
