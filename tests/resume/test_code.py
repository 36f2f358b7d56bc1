"""What a checkpoint knows of code: modules without weights, and the script's own files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from drivetrain.checkpoint.contract import Contract, ContractChanged
from drivetrain.train.setup.code import modules_of


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention, self.drop = nn.Linear(4, 4), nn.Dropout(dropout)


def test_of_repeated_blocks_the_first_is_named_and_each_that_differs() -> None:
    blocks = nn.ModuleList(Block(0.2 if number == 2 else 0.1) for number in range(4))
    assert modules_of(nn.Sequential(blocks, nn.GELU())) == {
        "model": "()",
        "0": "ModuleList()",
        "0.0": "Block()",
        "0.0.attention": "Linear(in_features=4, out_features=4, bias=True)",
        "0.0.drop": "Dropout(p=0.1, inplace=False)",
        "0.2.drop": "Dropout(p=0.2, inplace=False)",
        "1": "GELU(approximate='none')",
    }


def test_a_model_of_many_kinds_is_cut_and_what_is_cut_still_counts() -> None:
    def model(last: float) -> nn.Module:
        return nn.Sequential(
            *(nn.Dropout(number / 1000) for number in range(300)), nn.Dropout(last)
        )

    found = modules_of(model(0.5))
    assert len(found) == 201
    assert found != modules_of(model(0.6))


def test_a_module_that_cannot_be_printed_is_named_by_its_class() -> None:
    class Odd(nn.Module):
        def extra_repr(self) -> str:
            raise RuntimeError("not built yet")

    class Addressed(nn.Module):
        def extra_repr(self) -> str:
            return f"fn={object()}"

    assert modules_of(nn.Sequential(Odd()))["0"] == "Odd()"
    assert modules_of(nn.Sequential(Addressed())) == modules_of(nn.Sequential(Addressed()))


def test_only_the_modules_that_differ_are_named() -> None:
    contract = Contract({"model.modules": {"0": "Linear()", "1": "GELU()"}, "torch": "2.13"})
    before = {"model.modules": {"0": "Linear()", "1": "ReLU()"}, "torch": "2.13"}
    with pytest.raises(ContractChanged) as raised:
        contract.compare("step-4", before)
    assert str(raised.value).startswith("model.modules = 1=GELU(): was 1=ReLU() when step-4 ")
    (_, change) = contract.compare("step-4", {**before, "torch": "2.12"})
    assert change.outcome == "said", "another torch may describe the same module otherwise"


def test_files_that_only_one_attempt_imported_are_not_compared() -> None:
    contract = Contract({"code": {"train.py": "a", "late.py": "b"}})
    assert not contract.compare("step-4", {"code": {"train.py": "a", "early.py": "c"}})
    (change,) = contract.compare("step-4", {"code": {"train.py": "x", "late.py": "b"}})
    assert str(change) == "code: train.py; what it computes may differ from here on"


SCRIPT = """
import torch, drivetrain, losses
from torch.utils.data import TensorDataset
data = TensorDataset(torch.arange(32.0)[:, None])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1, 1))
config = drivetrain.load_config(defaults={"global_batch_size": 8, "micro_batch_size": 8})
loop = drivetrain.prepare(model, None, data, config)
for step in loop.steps():
    for (x,) in step:
        loop.backward(losses.loss(loop.model(x)))
    loop.step()
"""


@pytest.mark.slow
def test_an_edited_file_is_reported_when_the_run_is_resumed(tmp_path: Path) -> None:
    def run(steps: int) -> str:
        words = [sys.executable, "-B", "-m", "drivetrain", "train", "--run-dir=run", "train.py"]
        return subprocess.run(
            [*words, f"max_steps={steps}"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout

    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "losses.py").write_text("def loss(x): return x.square().mean()")
    run(2)
    again = run(4)
    assert "resumed: after step 2" in again
    assert "changed since" not in again
    assert "the script starts from its top" in again
    (tmp_path / "losses.py").write_text("def loss(x): return x.abs().mean()")
    said = "changed since: code: losses.py; what it computes may differ from here on"
    assert said in run(6)
