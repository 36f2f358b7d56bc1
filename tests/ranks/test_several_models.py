"""Several models and optimizers: a WGAN-GP gives the same numbers at any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import drivetrain
from drivetrain.testing import run_ranks
from drivetrain.train.keep_loop import KeptLoop
from drivetrain.train.several.optimizers import members
from tests.ranks import gan


def everything(folder: str) -> dict[str, tuple[list[list[float]], list[list[float]]]]:
    found = {strategy: gan.train_and_resume(folder, strategy) for strategy in ("ddp", "fsdp")}
    with pytest.raises(drivetrain.ConfigError, match=r"parallel\.tp = \d: several models"):
        gan.made(folder, "fsdp", parallel={"tp": torch.distributed.get_world_size()})
    return found


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_the_numbers_are_those_of_one_process(tmp_path: Path, num_ranks: int) -> None:
    """And a run that is killed is gone on with to the last bit."""
    expected, _ = gan.train_and_resume(str(tmp_path), "ddp")
    for found in run_ranks(everything, num_ranks, 120, args=(str(tmp_path),)):
        for whole, rest in found.values():
            for numbers, reference in zip(whole, expected, strict=True):
                assert numbers == pytest.approx(reference, rel=1e-5, abs=1e-6)
            assert rest == whole[2:]


def test_the_weights_are_those_of_plain_torch(tmp_path: Path) -> None:
    """The same batches and noise, in the loop as people write it."""
    torch.manual_seed(0)
    models = {"G": gan.Net(4, 2), "D": gan.Net(2, 1)}
    ours = {name: gan.copy_of(model) for name, model in models.items()}
    loop = drivetrain.prepare(
        ours, gan.optimizers_of(ours), gan.points(), gan.settings(str(tmp_path), "ddp") | WHOLE
    )
    optimizers, critic, generator = gan.optimizers_of(models), models["D"], models["G"]
    for step in loop.steps():
        for (real,) in step:
            state = torch.get_rng_state()
            first = torch.randn(len(real), 4)
            torch.set_rng_state(state)
            loop.backward(gan.critic_loss(loop, real), "D")
            torch.set_rng_state(state)
            fake = generator(torch.randn(len(real), 4)).detach()
            loss = critic(fake).mean() - critic(real).mean()
            (loss + 10 * gan.penalty(critic, real, fake)).backward()
        loop.step("D")
        optimizers["D"].step()
        for (real,) in step:
            noise = torch.randn(len(real), 4)
            assert not torch.equal(noise, first), "each pass draws from a stream of its own"
            loop.backward(-loop.model["D"](loop.model["G"](noise)).mean(), "G")
            (-critic(generator(noise)).mean()).backward()
        loop.step("G")
        optimizers["G"].step()
        for optimizer in optimizers.values():
            optimizer.zero_grad()
    for name, model in models.items():
        for parameter, own in zip(model.parameters(), ours[name].parameters(), strict=True):
            torch.testing.assert_close(parameter, own)


WHOLE: dict[str, Any] = {
    "micro_batch_size": 8,
    "optimization": {"max_grad_norm": None, "warmup_steps": 0},
}


def critic_pass(loop: KeptLoop, step: Any) -> None:
    for (real,) in step:
        loop.backward(loop.model["D"](real).mean(), "D")


def test_what_is_misnamed_or_forgotten_is_said(tmp_path: Path) -> None:
    loop = gan.made(str(tmp_path), "ddp")
    steps = loop.steps()
    step = next(steps)
    for (real,) in step:
        loss = loop.model["D"](real).mean()
        with pytest.raises(
            drivetrain.ConfigError, match="backward = 'd': is not one of the models; use 'G' or 'D'"
        ):
            loop.backward(loss, "d")
        with pytest.raises(drivetrain.ConfigError, match="backward = None: there are several"):
            loop.backward(loss)
        loop.backward(loss, "D")
        with pytest.raises(RuntimeError, match="called twice for one micro-batch: sum"):
            loop.backward(loss, "D")
        with pytest.raises(RuntimeError, match=r'step\("D"\) after a complete'):
            loop.step("D")
    with pytest.raises(RuntimeError, match=r'step\("G"\) after a complete'):
        loop.step("G")
    with pytest.raises(RuntimeError, match=r'step\("D"\) before the next'):
        critic_pass(loop, step)


def misname(loop: KeptLoop, step: Any) -> None:
    for (real,) in step:
        loop.backward(loop.model["D"](real).mean(), "G")
    loop.step("G")


def save_early(loop: KeptLoop, step: Any) -> None:
    critic_pass(loop, step)
    loop.step("D")
    loop.save()
    critic_pass(loop, step)


def keep_torchs(loop: KeptLoop, step: Any) -> None:
    for (real,) in step:
        loop.model["D"](real).mean().backward()


def nothing(loop: KeptLoop, step: Any) -> None:
    del loop, step


def leave_early(loop: KeptLoop, step: Any) -> None:
    del loop
    next(iter(step))
    next(iter(step))


@pytest.mark.parametrize(
    ("words", "act"),
    [
        (r'step\("D"\) was not', critic_pass),
        (r"step\(\) was not called", nothing),
        (r"loop\.backward\(loss, name\) was not .*; .* for every micro-batch", keep_torchs),
        ("does not depend on any trainable weight of G", misname),
        (r"call save\(\) after the last", save_early),
        ("was not completed", leave_early),
    ],
)
def test_a_step_that_is_not_whole_is_refused(tmp_path: Path, words: str, act: Any) -> None:
    loop = gan.made(str(tmp_path), "ddp")
    with pytest.raises((RuntimeError, drivetrain.ConfigError), match=words):
        for step in loop.steps():
            act(loop, step)


@pytest.mark.parametrize(
    ("words", "models", "optimizers", "more"),
    [
        ("optimizer: has the names G, d, but the models are G, D", ("G", "D"), ("G", "d"), {}),
        ("optimizer: has the names G, but the models are G, D", ("G", "D"), ("G",), {}),
        ("is not a valid model name", ("G", "a.b"), ("G", "a.b"), {}),
        (
            "parallel.strategy: this strategy",
            ("G",),
            ("G",),
            {"parallel": {"strategy": "local_sgd"}},
        ),
        ("parallel.strategy: this strategy", ("G",), ("G",), {"reproducibility": "bitwise"}),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path,
    words: str,
    models: tuple[str, ...],
    optimizers: tuple[str, ...],
    more: dict[str, Any],
) -> None:
    nets: dict[str, nn.Module] = {name: gan.Net(2, 1) for name in models}
    given = gan.optimizers_of(nets)
    named = dict(zip(optimizers, given.values(), strict=False))
    chosen = {**gan.settings(str(tmp_path), "ddp"), **more}
    with pytest.raises((drivetrain.ConfigError, ValueError), match=words):
        drivetrain.prepare(nets, named, gan.points(), chosen)
    with pytest.raises(drivetrain.ConfigError, match="is a dict, but there is only one model"):
        drivetrain.prepare(gan.Net(2, 1), given, gan.points(), chosen)


def test_one_model_takes_no_name(tmp_path: Path) -> None:
    net = gan.Net(2, 1)
    loop = drivetrain.prepare(net, None, gan.points(), gan.settings(str(tmp_path), "ddp"))
    for (real,) in next(loop.steps()):
        with pytest.raises(
            drivetrain.ConfigError, match="there is only one model, and it has no name"
        ):
            loop.backward(net(real).mean(), "G")
        break


def how_critical(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    return {"loss": model["D"](batch[0]).mean()}


def test_frozen_parts_keep_their_mode_and_a_model_that_comes_in_eval_is_trained(
    tmp_path: Path,
) -> None:
    norm = nn.BatchNorm1d(2).eval().requires_grad_(False)
    critic = nn.Sequential(norm, nn.Linear(2, 1))
    models = {"G": gan.Net(2, 1).eval(), "D": critic}
    chosen = gan.settings(str(tmp_path), "ddp", optimization={"optimizer": "sgd"})
    loop = drivetrain.prepare(models, None, gan.points(), chosen)
    assert all(isinstance(each, torch.optim.SGD) for each in members(loop.optimizer))
    for step in loop.steps():
        assert models["G"].training
        for (real,) in step:
            loop.backward(critic(real).mean(), "D")
            loop.backward(models["G"](real).mean(), "G")
        loop.step("D")
        loop.step("G")
        assert loop.evaluate(gan.points(), how_critical).num_samples == 22
    assert not norm.training
    assert norm.running_mean is not None
    assert not norm.running_mean.any()
    assert loop.history.steps[-1].parts.keys() == {"G", "D"}
