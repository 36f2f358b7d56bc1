"""`drivetrain checkpoint` on what two ranks wrote in shards, read by one process alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from drivetrain.checkpoint.compare import compare
from drivetrain.checkpoint.locate import locate
from drivetrain.checkpoint.manifest import checksum
from drivetrain.checkpoint.weight_files import WeightFiles
from drivetrain.cli.main import app
from drivetrain.core.errors import ConfigError, DrivetrainError
from drivetrain.record import session
from drivetrain.testing import run_ranks
from drivetrain.train.trainer import Trainer
from tests.gpt_task import gpt_task
from tests.ranks.resuming import go_on_in, make_sums_fit
from tests.ranks.training import sentences, settings

FIRST, SECOND = "step-000000002-a1", "step-000000004-a1"


def train(output_dir: str, **changes: Any) -> None:
    changes |= {"global_batch_size": 8, "micro_batch_size": 4, "optimization": {}}
    config = settings(output_dir, max_steps=4, checkpoint={"every_steps": 2}, **changes)
    Trainer(gpt_task(), config).fit(sentences())


def train_fsdp(output_dir: str) -> None:
    train(output_dir, parallel={"strategy": "fsdp"})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "gpt"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(session.RUN_DIR, str(path))
        run_ranks(train_fsdp, 2, args=(str(path.parent),))
    return path


@pytest.fixture
def own_run(run: Path, tmp_path: Path) -> Path:
    """A copy that may be spoilt."""
    return Path(shutil.copytree(run, tmp_path / "gpt"))


def says(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def trained(run: Path) -> dict[str, torch.Tensor]:
    """What the run itself wrote when it ended, gathered from its ranks."""
    weights: dict[str, torch.Tensor] = torch.load(
        run / "checkpoints" / "weights.pt", weights_only=True
    )
    return weights


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
        assert ours[name].dtype == tensor.dtype


def test_weights_in_one_file_are_the_trainers(run: Path, tmp_path: Path) -> None:
    code, output = says("export", run, tmp_path / "hf")
    assert (code, os.listdir(tmp_path / "hf")) == (0, ["model.safetensors"])
    assert f"{SECOND}: 30 tensors, 111.6 KiB →" in output.replace("\n", " ")
    assert_same(load_file(tmp_path / "hf" / "model.safetensors"), trained(run))


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf"])
def test_files_of_no_size_are_refused(run: Path, tmp_path: Path, size: str) -> None:
    with pytest.raises(ConfigError, match=r"--max-shard-gb = .*: must be a number above 0"):
        says("export", run, tmp_path / "hf", "--max-shard-gb", size)


def test_weights_in_several_files_are_the_trainers(run: Path, tmp_path: Path) -> None:
    says("export", run, tmp_path / "hf", "--max-shard-gb", 50_000 / 1e9)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sorted(os.listdir(tmp_path / "hf")) == [*files, "model.safetensors.index.json"]
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        shard = load_file(tmp_path / "hf" / file)
        assert {index["weight_map"][name] for name in shard} == {file}
        assert sum(t.nbytes for t in shard.values()) <= 50_000
        weights |= shard
    assert_same(weights, trained(run))
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights.values())


def test_a_pt_file_of_a_chosen_step(run: Path, tmp_path: Path) -> None:
    says("export", run / "checkpoints", tmp_path / "new" / "gpt.pt", "--step", 2)
    _, output = says("export", run / "checkpoints" / FIRST, tmp_path / "same.pt")
    assert output.endswith(f" → {tmp_path / 'same.pt'}\n")
    first = torch.load(tmp_path / "new" / "gpt.pt", weights_only=True)
    assert_same(torch.load(tmp_path / "same.pt", weights_only=True), first)
    assert not torch.equal(first["head.weight"], trained(run)["head.weight"])


@pytest.mark.parametrize(
    ("most", "expected"), [(6, [["a", "b"], ["c"], ["d", "e"]]), (100, [["a", "b", "c", "d", "e"]])]
)
def test_files_hold_what_fits(most: int, expected: list[list[str]], tmp_path: Path) -> None:
    files = WeightFiles(tmp_path, most)
    for name, size in (("a", 3), ("b", 3), ("c", 9), ("d", 1), ("e", 4)):
        files.add(name, torch.zeros(size, dtype=torch.uint8))
    names = [name for name in files.finish() if name.endswith(".safetensors")]
    assert [sorted(load_file(tmp_path / name)) for name in names] == expected


@pytest.mark.parametrize("target", ["hf", "gpt.pt"])
def test_an_export_is_whole_or_is_not(target: str, own_run: Path, tmp_path: Path) -> None:
    data = own_run / "checkpoints" / SECOND / "data-00001.bin"
    content = bytearray(data.read_bytes())
    content[1000] ^= 1
    data.write_bytes(content)
    folder = tmp_path / "out"
    with pytest.raises(DrivetrainError, match=f"{SECOND}: data-00001.bin is damaged at .*--step"):
        says("export", own_run, folder / target)
    assert os.listdir(folder) == []
    says("export", own_run, folder / target, "--step", 2)
    with pytest.raises(ConfigError, match="target = .*: already exists; remove it"):
        says("export", own_run, folder / target, "--step", 2)


def test_ls(run: Path) -> None:
    for address in (run, run / "checkpoints", f"file://{run}"):
        code, output = says("ls", address)
        lines = output.splitlines()
        assert code == 0
        assert [line.split()[0] for line in lines[1:]] == [SECOND, FIRST]
        assert lines[1].split()[4:] == ["KiB", "good", "fsdp", "dp_shard=2"]
    assert says("ls", run / "checkpoints" / FIRST)[1].count("step-") == 1
    listed = json.loads(says("ls", run, "--json")[1])
    assert [entry["step"] for entry in listed] == [4, 2]
    assert listed[0]["layout"]["dp_shard"] == 2
    assert listed[0]["state"] == "good"


def test_ls_finds_checkpoints_that_lie_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on_in(tmp_path / "run", monkeypatch)
    rule = {"every_steps": 1, "directory": str(tmp_path / "big-disk")}
    config = settings("", max_steps=1, optimization={}, checkpoint=rule)
    Trainer(gpt_task(), config).fit(sentences())
    assert "step-000000001-a1" in says("ls", tmp_path / "run")[1]
    assert "step-000000001-a1" in says("verify", tmp_path / "big-disk")[1]


def test_verify_names_each_damaged_one(own_run: Path) -> None:
    assert says("verify", own_run)[0] == 0
    data = own_run / "checkpoints" / SECOND / "data-00001.bin"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    (own_run / "checkpoints" / FIRST / "index.json").unlink()
    (own_run / "checkpoints" / "step-000000006-a1").mkdir()
    code, output = says("verify", own_run, "--json")
    assert code == 1
    assert [(e["folder"], e["state"], e["problem"]) for e in json.loads(output)] == [
        ("step-000000006-a1", "unfinished", "no manifest.json: the save did not finish"),
        (SECOND, "damaged", "data-00001.bin does not match its checksum"),
        (FIRST, "damaged", "index.json is missing"),
    ]
    code, output = says("verify", own_run)
    assert code == 1
    assert "index.json is missing" in output


def test_an_unfinished_one_is_no_damage(own_run: Path) -> None:
    (own_run / "checkpoints" / "step-000000006-a1").mkdir()
    code, output = says("verify", own_run)
    assert (code, "unfinished" in output) == (0, True)


def test_diff_of_the_same_and_of_others(run: Path) -> None:
    code, output = says("diff", run, run / "checkpoints" / SECOND)
    assert code == 0
    assert output.startswith("the same: 122 tensors bit for bit")
    code, output = says("diff", run / "checkpoints" / FIRST, run, "--json")
    assert code == 1
    found = json.loads(output)
    by_name = {each["name"]: each for each in found["differences"]}
    assert (by_name["step"]["here"], by_name["step"]["there"]) == ("2", "4")
    assert by_name["position.samples"]["there"] == "32"
    assert by_name["model.head.weight"]["what"] == "numbers"
    assert 0 < by_name["model.head.weight"]["max_abs"] < 1
    assert by_name["optimizer.head.bias.step"]["max_abs"] == 2
    assert "rank.00000" not in by_name, "what a rank alone had is compared value by value"
    assert "largest gap" in says("diff", run / "checkpoints" / FIRST, run)[1]


def spoil_one_number(run: Path, by: float) -> None:
    """Write another number, every checksum fitting: as if training had come to it."""
    folder = run / "checkpoints" / SECOND
    index = json.loads((folder / "index.json").read_bytes())
    chunk = index["model.norm.weight"]["chunks"][0]
    data = bytearray((folder / chunk[2]).read_bytes())
    part = slice(chunk[3], chunk[3] + chunk[4])
    numbers = torch.frombuffer(bytearray(data[part]), dtype=torch.float32)
    numbers[3] = by if by != by else numbers[3] + by  # noqa: PLR0124 - NaN stays one
    data[part] = numbers.numpy().tobytes()
    (folder / chunk[2]).write_bytes(data)
    chunk[5] = checksum(bytes(data[part]))
    (folder / "index.json").write_text(json.dumps(index))
    make_sums_fit(folder)


@pytest.mark.parametrize("by", [0.25, float("nan")])
def test_diff_finds_one_number(by: float, run: Path, own_run: Path) -> None:
    spoil_one_number(own_run, by)
    sides = [(each.storage, each.choose()) for each in (locate(str(run)), locate(str(own_run)))]
    found = compare(sides[0], sides[1])
    assert [each.name for each in found.differences] == ["model.norm.weight"]
    assert found.differences[0].here == "1 of 32 numbers"
    gap = found.differences[0].max_abs
    assert gap is not None
    assert gap == pytest.approx(by, abs=1e-6, nan_ok=True)
    assert found.num_identical == 121


def reshape_one(run: Path) -> None:
    """The same bytes as another form, every checksum fitting."""
    folder = run / "checkpoints" / SECOND
    index = json.loads((folder / "index.json").read_bytes())
    entry = index["model.norm.weight"]
    entry["size"] = [4, 8]
    for chunk in entry["chunks"]:
        chunk[0], chunk[1] = [chunk[0][0] // 8, 0], [chunk[1][0] // 8, 8]
    (folder / "index.json").write_text(json.dumps(index))
    make_sums_fit(folder)


def test_diff_names_another_shape(run: Path, own_run: Path) -> None:
    reshape_one(own_run)
    sides = [(each.storage, each.choose()) for each in (locate(str(run)), locate(str(own_run)))]
    (found,) = compare(sides[0], sides[1]).differences
    assert (found.name, found.what) == ("model.norm.weight", "shape")
    assert (found.here, found.there) == ("float32[32]", "float32[4, 8]")


def test_diff_of_two_forms(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on_in(tmp_path / "one", monkeypatch)
    train("", parallel={"strategy": "ddp"})
    code, output = says("diff", tmp_path / "one", run, "--json")
    by_name = {each["name"]: each for each in json.loads(output)["differences"]}
    assert code == 1
    assert by_name["layout.dp_shard"]["there"] == "2"
    assert by_name["rank.00001"]["what"] == "only there"
    assert "model.head.weight" not in by_name or by_name["model.head.weight"]["max_abs"] < 1e-5


def test_what_cannot_be_found_says_what_to_give(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="checkpoints = .*: no checkpoints found; give a run's"):
        says("ls", tmp_path / "nothing")
    with pytest.raises(ConfigError, match="no checkpoints found"):
        says("ls", run / "checkpoints" / "step-000000099-a1")
    with pytest.raises(ConfigError, match="--step = 3: .* choose one of 2, 4"):
        says("export", run, tmp_path / "hf", "--step", 3)


def test_help_needs_no_torch_and_a_wrong_address_no_traceback(tmp_path: Path) -> None:
    modules = "sys, drivetrain.cli.main, drivetrain.cli.checkpoint"
    code = f"import {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    result = subprocess.run(
        [sys.executable, "-m", "drivetrain", "checkpoint", "ls", "nothing"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert result.returncode == 2
    words = "checkpoints = nothing: no checkpoints found; give a run's directory"
    assert result.stderr.startswith(words)
