"""Experts over ranks train what one process trains, resume anywhere, and mistakes are seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.config.load import resolve
from drivetrain.core.errors import ConfigError
from drivetrain.data.sources import source_from
from drivetrain.parallel.expert.dispatch import Dispatch
from drivetrain.record.expert_load import load_records
from drivetrain.record.reading import open_run
from drivetrain.testing import run_ranks
from drivetrain.train.assemble import assemble
from drivetrain.train.saving.weights import weights_sha256
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer
from drivetrain.train.weights import recording
from tests.ranks import matrix, models
from tests.ranks.training import largest_deviation

STEPS = 6
EP = matrix.LAYOUTS["ep"][1]
FSDP = matrix.FSDP


def one_sided() -> nn.Module:
    """Every token goes to experts 0 and 1: the second of two ranks gets none."""
    model = models.moe(layers=2)
    for block in model.get_submodule("blocks").children():
        router = block.get_submodule("moe.router")
        assert isinstance(router, nn.Linear)
        nn.init.constant_(block.get_parameter("norm2.bias"), 1.0)
        with torch.no_grad():
            router.weight.mul_(0.01)
            router.weight[:2] += 1.0
    return model


class Normalizing(nn.Module):
    """Takes its tokens' weights together: one expert alone would have a weight of 1."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.num_experts = 8
        self.up, self.down = experts.get_parameter("up"), experts.get_parameter("down")
        self.inner = [experts]

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = torch.einsum("tkij,tj->tki", self.up[chosen], x)
        rows = torch.einsum("tkij,tkj->tki", self.down[chosen], rows)
        return (rows * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)


def normalizing() -> nn.Module:
    model = models.moe(layers=1)
    layer: Any = model.get_submodule("blocks.0.moe")
    layer.experts = Normalizing(layer.experts)
    return model


def train(
    make: Callable[[], nn.Module], folder: str, parallel: Any, steps: int = STEPS, **more: Any
) -> Trainer:
    task, data = models.task_of("moe")
    trainer = Trainer(Task(make, task.loss), matrix.config(folder, steps, parallel, **more))
    trainer.fit(data)
    return trainer


def numbers(trainer: Trainer) -> tuple[list[float], list[float]]:
    steps = trainer.history.steps
    return [s.loss for s in steps], [s.grad_norm for s in steps if s.grad_norm is not None]


def first_weights(folder: str, parallel: Any, how: str) -> str:
    task, data = models.task_of("moe")
    resolved = resolve(matrix.config(folder, 1, parallel, model={"initialization": how}))
    made = assemble(task, resolved, source_from(data, resolved.config.data))
    return weights_sha256(dict(sorted(made.engine.spread.full_state().items())))


# mutants: each plants one mistake in what a rank does with tokens, until it is taken back


@contextmanager
def replaced(name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(Dispatch, name)
    setattr(Dispatch, name, make(original))
    try:
        yield
    finally:
        setattr(Dispatch, name, original)


def swapped_experts(original: Any) -> Any:
    def swapped(self: Any, received: Any, device: Any) -> torch.Tensor:
        found: torch.Tensor = original(self, received, device)
        return found ^ 1

    return swapped


def dropped_token(original: Any) -> Any:
    def dropping(self: Any, rows: Any, expert: Any, scales: Any) -> torch.Tensor:
        made: torch.Tensor = original(self, rows, expert, scales)
        keep = torch.ones(len(made), 1)
        keep[-1:] = 0
        return made * keep

    return dropping


def wrong_router(original: Any) -> Any:
    def routed(self: Any, rows: Any, expert: Any, scales: Any) -> torch.Tensor:
        made: torch.Tensor = original(self, rows, expert, scales.roll(1))
        return made

    return routed


MUTANTS = {
    "swapped experts": ("_expert_of_each", swapped_experts),
    "dropped token": ("_compute", dropped_token),
    "wrong router": ("_compute", wrong_router),
}


def on_two_ranks(folder: str) -> dict[str, Any]:
    recording.SMALL = 0
    found: dict[str, Any] = {}
    found["ep"] = numbers(whole := train(models.moe, folder, EP))
    found["run"] = str(whole.history.run_dir)
    found["one-sided"] = numbers(train(one_sided, folder, EP))
    found["bf16"] = numbers(train(models.moe, folder, EP, precision={"dtype": "bf16"}))[0]
    again = {"activation_checkpointing": "selective"}
    found["recomputed"] = numbers(train(models.moe, folder, EP, memory=again))
    found["handed over"] = matrix.hand_over(folder, "moe", [("ep", EP), ("fsdp", FSDP)], STEPS)
    found["first weights"] = {
        (name, how): first_weights(folder, parallel, how)
        for name, parallel in {"ep": EP, "fsdp": FSDP}.items()
        for how in ("sequential", "keyed")
    }
    with pytest.raises(ConfigError, match="not the sum of its experts' results"):
        train(normalizing, folder, EP)
    with pytest.raises(ConfigError, match="does not divide the 3 experts of blocks.0.moe.experts"):
        train(lambda: models.moe(num_experts=3), folder, EP)
    found["mutants"] = {}
    for name, (method, make) in MUTANTS.items():
        with replaced(method, make):
            found["mutants"][name] = numbers(train(models.moe, folder, EP))[0]
    return found


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(400)
def test_experts_on_two_ranks(tmp_path: Path) -> None:
    found = run_ranks(on_two_ranks, 2, 380, args=(str(tmp_path / "ranks"),))[0]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    losses, norms = numbers(train(models.moe, str(tmp_path), {}))
    lopsided, lopsided_norms = numbers(train(one_sided, str(tmp_path), {}))
    torch.set_num_threads(threads)

    def is_same(found: Any, reference: list[float]) -> bool:
        return largest_deviation(found, reference) <= matrix.TOLERANCE

    assert is_same(found["ep"][0], losses)
    assert is_same(found["ep"][1], norms), "the norm that gradients are clipped by"
    assert is_same(found["one-sided"][0], lopsided)
    assert is_same(found["one-sided"][1], lopsided_norms)
    assert is_same(found["recomputed"][0], losses)
    assert largest_deviation(found["bf16"], losses) < 0.02
    assert all(is_same(each, losses) for each in found["handed over"].values())
    digests = found["first weights"]
    for how in ("sequential", "keyed"):
        assert digests["ep", how] == digests["fsdp", how] == first_weights(str(tmp_path), {}, how)
    for name, mutant in found["mutants"].items():
        assert not is_same(mutant, losses), name
    load = load_records(open_run(found["run"]).events(0))
    assert load
    # five steps, the third of which ends an epoch, each token to two experts; turns in which a
    # rank only keeps step do not count
    tokens = (16 + 16 + 12 + 16 + 16) * models.LENGTH * 2
    assert [sum(each) for each in load[0].layers.values()] == [tokens] * models.LAYERS


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_experts_go_with_every_other_axis(tmp_path: Path) -> None:
    names = ("ep×fsdp", "ep×hsdp", "ep×tp", "ep×pp")
    reference = two_steps(str(tmp_path), {"one process": {}})["one process"]
    layouts = {name: matrix.LAYOUTS[name][1] for name in names}
    found = run_ranks(two_steps, 4, 380, args=(str(tmp_path / "ranks"), layouts))[0]
    for name, (losses, norms) in found.items():
        assert largest_deviation(losses, reference[0]) <= matrix.TOLERANCE, name
        assert largest_deviation(norms, reference[1]) <= matrix.TOLERANCE, name


HUGGING_FACE = ("hf_mixtral", "hf_qwen_moe")


def train_hugging_face(folder: str, parallel: Any) -> dict[str, tuple[list[float], list[float]]]:
    found = {}
    for name in HUGGING_FACE:
        task, data = models.task_of(name)
        trainer = Trainer(task, matrix.config(folder, STEPS, parallel))
        trainer.fit(data)
        found[name] = numbers(trainer)
    return found


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(400)
def test_hugging_faces_models_train_what_one_process_trains(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = run_ranks(train_hugging_face, 2, 380, args=(str(tmp_path / "ranks"), EP))[0]
    reference = train_hugging_face(str(tmp_path), {})
    for name in HUGGING_FACE:
        for values, expected in zip(found[name], reference[name], strict=True):
            assert largest_deviation(values, expected) <= matrix.TOLERANCE, name


def test_no_token_gets_lost_on_its_way(tmp_path: Path) -> None:
    """The quick one. Norms too: Adam takes no notice of gradients that are a multiple."""
    found = run_ranks(two_steps, 2, 100, args=(str(tmp_path / "ranks"), {"ep": EP}))[0]["ep"]
    reference = two_steps(str(tmp_path), {"one process": {}})["one process"]
    for values, expected in zip(found, reference, strict=True):
        assert largest_deviation(values, expected) <= matrix.TOLERANCE


def two_steps(folder: str, layouts: dict[str, Any]) -> dict[str, tuple[list[float], list[float]]]:
    return {
        name: numbers(train(models.moe, folder, parallel, steps=2))
        for name, parallel in layouts.items()
    }
