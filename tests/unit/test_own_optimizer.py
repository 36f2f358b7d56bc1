"""Config keys that a script's own optimizer or schedule leaves without effect."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import TensorDataset

from drivetrain import ConfigError, PyTorchDDPTrainer, Task, Trainer, load_config, prepare
from drivetrain.config.provenance import ResolvedConfig
from drivetrain.config.schema import Optimization
from drivetrain.config.script_reads import OPTIMIZER_KEYS
from drivetrain.train.history import History
from drivetrain.train.optimization.optimizers import from_config
from drivetrain.train.optimization.own_optimizer import WatchedSection
from tests.ranks.resuming import go_on_in

RATE = "optimization.learning_rate"
SCHEDULED = {
    "lr_scheduler_type": "linear",
    "warmup_steps": 2,
    "warmup_ratio": 0.5,
    "decay_steps": 2,
    "min_lr_ratio": 0.5,
    "learning_rate_scaling": "linear",
    "base_batch_size": 4,
    "max_grad_norm": 1.0,
}
"""The other keys of the section: they apply to any optimizer."""


def data() -> TensorDataset:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).long())


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def task(optimizer: Any = sgd, **more: Any) -> Task:
    return Task(model=lambda: nn.Linear(4, 2), loss=loss, optimizer=optimizer, **more)


@pytest.fixture
def resolved(quiet: dict[str, Any]) -> Callable[..., ResolvedConfig]:
    """A config as a script loads it, with these words on the command line."""
    base = {"global_batch_size": 8, "max_steps": 2, "checkpoint": {"every_steps": None}, **quiet}

    def make(*words: str, **changes: Any) -> ResolvedConfig:
        return load_config(argv=words, defaults={**base, **changes})

    return make


def fit(made: Task, config: Any) -> History:
    return Trainer(made, config).fit(data())


def notes_of(made: Task, config: Any) -> tuple[str, ...]:
    """What a run says before its first step."""
    trainer = Trainer(made, config)
    trainer.fit(data())
    assert trainer.assembly is not None
    return trainer.assembly.notes


def by_prepare(config: Any) -> None:
    model = nn.Linear(4, 2)
    prepare(model, sgd(model.parameters()), data(), config)


def by_prepare_with_a_schedule(config: Any) -> None:
    model = nn.Linear(4, 2)
    optimizer = sgd(model.parameters())
    scheduler = LambdaLR(optimizer, lambda _: 0.5)
    prepare(model, optimizer, data(), config, scheduler=scheduler)


def by_prepare_of_two(config: Any) -> None:
    models = {name: nn.Linear(4, 2) for name in "ab"}
    optimizers = {name: sgd(model.parameters()) for name, model in models.items()}
    prepare(models, optimizers, data(), config)


@pytest.mark.parametrize(
    "train",
    [
        partial(fit, task()),
        partial(fit, task(partial(torch.optim.SGD, lr=0.05))),
        partial(fit, task(lambda parameters, optimization: sgd(parameters))),  # noqa: ARG005
        partial(fit, task(schedule=lambda optimizer, _: LambdaLR(optimizer, lambda _: 0.5))),
        by_prepare,
        by_prepare_of_two,
    ],
)
def test_a_learning_rate_that_the_script_does_not_use_is_refused(
    train: Callable[[Any], Any], resolved: Any
) -> None:
    with pytest.raises(ConfigError) as raised:
        train(resolved(f"{RATE}=1e-3"))
    assert str(raised.value).replace("SGD + SGD", "SGD") == (
        f"{RATE} = 0.001: set on the command line, but the script has its own optimizer (SGD, "
        "lr = 0.05), which does not use it; set it in the script, use the config's value there, or "
        "leave out the optimizer"
    )


def test_the_error_says_where_it_was_set(resolved: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("optimization: {learning_rate: 0.1}")
    with pytest.raises(ConfigError, match=f"set in {re.escape(str(file))}, but"):
        fit(task(), resolved("--config", str(file)))


def test_a_value_of_the_scripts_own_is_announced(resolved: Any) -> None:
    """The script may have used it in a way that nobody can see."""
    warning = f"warning: {RATE} = 0.1 has no effect: the script has its own optimizer (SGD, lr = "
    for config in (resolved(optimization={"learning_rate": 0.1}), resolved(f"{RATE}=0.1").config):
        assert any(warning in note for note in notes_of(task(), config))


def test_a_default_that_is_written_out_says_nothing(resolved: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("optimization: {momentum: null, decay_norms_and_biases: false}")
    assert not any(
        "no effect" in note for note in notes_of(task(), resolved("--config", str(file)))
    )


def test_what_the_script_reads_from_its_config_it_may_use(resolved: Any) -> None:
    config = resolved(f"{RATE}=0.1", "optimization.weight_decay=0.2")
    rate = config.config.optimization.learning_rate * 8
    with pytest.raises(ConfigError, match=r"^optimization.weight_decay = 0\.2: .*"):
        fit(task(lambda parameters: torch.optim.SGD(parameters, lr=rate)), config)
    dict(config.config.optimization)
    assert not any("no effect" in note for note in notes_of(task(), config))


def test_a_copy_of_the_whole_config_may_be_for_a_log(resolved: Any) -> None:
    config = resolved(f"{RATE}=0.1")
    config.config.model_dump()
    assert any(f"{RATE} = 0.1 has no effect" in note for note in notes_of(task(), config))


def test_settings_that_are_no_numbers_are_not_compared(resolved: Any) -> None:
    def odd(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(parameters, lr=torch.tensor(1e-3))
        made.param_groups[0]["momentum_schedule"] = made.param_groups[0]["weight_decay_of"] = None
        made.param_groups[0]["max_lr"] = None
        return made

    assert len(fit(task(odd), resolved(f"{RATE}=1e-3")).steps) == 2, "in fewer digits the same"


def test_every_key_of_the_section_is_one_or_the_other() -> None:
    assert {*OPTIMIZER_KEYS, *SCHEDULED} == set(Optimization.model_fields)


def test_all_keys_without_effect_are_named_at_once(resolved: Any) -> None:
    words = {
        "optimizer": "muon",
        "learning_rate": 0.1,
        "weight_decay": 0.1,
        "momentum": 0.9,
        "decay_norms_and_biases": "true",
        "adamw_implementation": "fused",
        "muon_dtype": "bf16",
    }
    assert words.keys() == set(OPTIMIZER_KEYS)
    with pytest.raises(ConfigError) as raised:
        fit(task(), resolved(*(f"optimization.{key}={value}" for key, value in words.items())))
    found = [problem.where.removeprefix("optimization.") for problem in raised.value.problems]
    assert found == list(words)


def test_the_other_keys_apply_to_the_scripts_optimizer(resolved: Any) -> None:
    words = ("warmup_steps=2", "learning_rate_scaling=linear", "base_batch_size=4")
    clipped = ("max_grad_norm=1e-9", "lr_scheduler_type=linear", "min_lr_ratio=0.5")
    config = resolved(*(f"optimization.{word}" for word in (*words, *clipped)), "max_steps=4")
    history = fit(task(), config)
    assert [step.learning_rate for step in history.steps] == pytest.approx([0.05, 0.1, 0.1, 0.075])
    assert history.losses[0] == pytest.approx(history.losses[-1], abs=0.2), "clipped to nothing"


def test_what_the_scripts_function_reads_is_in_effect(resolved: Any) -> None:
    def scaled(parameters: Any, optimization: Optimization) -> torch.optim.Optimizer:
        assert isinstance(optimization, Optimization)
        return torch.optim.SGD(parameters, lr=3 * optimization.learning_rate)

    def whole(parameters: Any, optimization: Optimization) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=2 * dict(optimization)["learning_rate"])

    config = resolved(f"{RATE}=0.1")
    assert fit(task(scaled), config).steps[0].learning_rate == pytest.approx(0.3)
    with pytest.raises(ConfigError, match=r"weight_decay = 0\.1: .* \(SGD, weight_decay = 0\)"):
        fit(task(scaled), resolved(f"{RATE}=0.1", "optimization.weight_decay=0.1"))
    assert fit(task(whole), config).steps[0].learning_rate == pytest.approx(0.2)


@pytest.mark.parametrize("read", ["model_dump", "model_dump_json", "model_copy", "__dict__"])
def test_reading_the_section_as_a_whole_reads_every_key(read: str) -> None:
    section = WatchedSection.of(Optimization(learning_rate=0.5))
    assert section.unread == set(OPTIMIZER_KEYS)
    assert section.max_grad_norm is None
    assert section.unread == set(OPTIMIZER_KEYS), "no optimizer's key"
    found = getattr(section, read)
    assert str(found() if callable(found) else found).count("0.5") == 1
    assert not section.unread


def test_a_value_that_the_script_passed_on_itself_is_in_effect(resolved: Any) -> None:
    config = resolved(f"{RATE}=0.1", "optimization.weight_decay=0.2", "optimization.momentum=0.3")
    said = config.config.optimization
    model = nn.Linear(4, 2)
    groups = [
        {"params": [model.weight]},
        {"params": [model.bias], "lr": said.learning_rate / 10, "weight_decay": 0.0},
    ]
    kwargs = {"momentum": said.momentum, "weight_decay": said.weight_decay}
    optimizer = torch.optim.SGD(groups, lr=said.learning_rate, **kwargs)
    scheduler = LambdaLR(optimizer, lambda step: step / 10)  # the rate is 0 before the first step
    loop = prepare(model, optimizer, data(), config, scheduler=scheduler)
    assert str(loop.assembly.resolved.source(RATE)) == "command line"


def test_run_yaml_tells_what_was_not_used_and_can_be_loaded_again(
    resolved: Any, tmp_path: Path
) -> None:
    trainer = Trainer(task(), resolved())
    trainer.fit(data())
    assert trainer.run_dir is not None
    file = trainer.run_dir / "run.yaml"
    sources = yaml.safe_load(file.read_text())["sources"]
    assert sources[RATE].startswith("unused: the script has its own optimizer (SGD, lr = 0.05)")
    assert sources["optimization.max_grad_norm"] == "default"
    assert len(fit(task(), resolved("--config", str(file))).steps) == 2
    other = Trainer(task(from_config), resolved(f"{RATE}=0.1"))
    other.fit(data())
    assert other.run_dir is not None
    set_there = str(other.run_dir / "run.yaml")
    with pytest.raises(ConfigError, match=rf"{RATE} = 0\.1: set in .*run\.yaml, but"):
        fit(task(), resolved("--config", set_there))


def saving(**more: Any) -> dict[str, Any]:
    return {"checkpoint": {"every_steps": 1, "asynchronous": False}, "name": "a", **more}


def test_a_run_that_began_with_such_a_value_is_resumed(
    resolved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a release that ignored the key has recorded it."""
    config = resolved(**saving())
    fit(task(), config)
    folder = Path(config.config.output_dir) / "a"
    text = (folder / "run.yaml").read_text()
    (folder / "run.yaml").write_text(text.replace("learning_rate: 0.001", "learning_rate: 0.3"))
    go_on_in(folder, monkeypatch)
    notes = notes_of(task(), resolved(f"{RATE}=0.3", "max_steps=4", **saving()))
    assert (
        f"warning: {RATE} = 0.3 has no effect: the script has its own optimizer (SGD, lr = 0.05), "
        "which does not use it"
    ) in notes
    assert (folder / "attempts/0002/run.yaml").is_file()
    monkeypatch.setattr("drivetrain.record.session._opened", 0)
    with pytest.raises(ConfigError, match=rf"{RATE} = 0\.7: set on the command line"):
        fit(task(), resolved(f"{RATE}=0.7", "max_steps=6", **saving()))


def test_a_resume_does_not_compare_what_the_script_does_not_use(
    resolved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever removes a key that had no effect can still resume."""

    def reading(parameters: Any, optimization: Optimization) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=optimization.learning_rate)

    config = resolved(f"{RATE}=0.05", **saving())
    fit(task(reading), config)
    go_on_in(Path(config.config.output_dir) / "a", monkeypatch)
    history = fit(task(), resolved("max_steps=4", **saving()))
    assert (history.resumed_step, len(history.steps)) == (2, 2)


def test_keys_of_the_curve_are_refused_beside_the_scripts_schedule(resolved: Any) -> None:
    for word in ("min_lr_ratio=0.2", "warmup_steps=1", "lr_scheduler_type=cosine"):
        said = r"set on the command line, but the script has its own schedule, and only one can set"
        with pytest.raises(ConfigError, match=said):
            by_prepare_with_a_schedule(resolved(f"optimization.{word}"))


def test_a_schedule_that_replaces_the_learning_rate_is_announced(resolved: Any) -> None:
    def one_cycle(optimizer: Any, total_steps: Any) -> Any:
        return OneCycleLR(optimizer, 0.5, total_steps=total_steps)

    def halved(optimizer: Any, _: Any) -> Any:
        return LambdaLR(optimizer, lambda _: 0.5)

    config = resolved(f"{RATE}=0.1", "max_steps=10")
    said = (
        f"warning: {RATE} = 0.1 (set on the command line): the script's schedule replaces it, and "
        "the rate starts at 0.02"
    )
    assert said in notes_of(task(from_config, schedule=one_cycle), config)
    assert "warning" not in str(notes_of(task(from_config, schedule=halved), config))


def test_a_drop_in_trainers_learning_rate_and_an_optimizer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(**settings: Any) -> None:
        """Train beside an optimizer whose learning rate is 0.05."""
        model = nn.Linear(4, 2)
        given: dict[str, Any] = {"num_gpus": 1, "batch_size": 8, "tensorboard": False}
        PyTorchDDPTrainer(
            model,
            optimizer=sgd(model.parameters()),
            tensorboard_dir=str(tmp_path),
            **given,
            **settings,
        ).fit(data(), max_steps=1)

    told = r"warning: optimization\.learning_rate = 0\.1 has no effect: .* \(SGD, lr = 0\.05\)"
    train()
    train(learning_rate=0.05)
    assert not re.search(told, "".join(capfd.readouterr()))
    train(learning_rate=0.1)
    assert re.search(told, "".join(capfd.readouterr()))


def test_defaults_of_training_arguments_are_nobodys_choice(resolved: Any) -> None:
    transformers = pytest.importorskip("transformers")
    from drivetrain import config_from_training_arguments

    def converted(**changes: Any) -> Any:
        given = {"output_dir": "out", "use_cpu": True, "max_steps": 2, "report_to": "none"}
        defaults = config_from_training_arguments(
            transformers.TrainingArguments(**given, **changes)
        )
        quiet = resolved().config
        return load_config(
            argv=[f"output_dir={quiet.output_dir}", "record.progress=none"], defaults=defaults
        )

    config = converted()
    assert str(config.source(RATE)) == "default: TrainingArguments"
    assert str(config.source("max_steps")) == "script"
    scheduled = task(schedule=lambda optimizer, _: LambdaLR(optimizer, lambda _: 1.0))
    assert fit(scheduled, config).steps[0].learning_rate == 0.05
    notes = notes_of(task(), converted(learning_rate=3e-4))
    assert any(f"warning: {RATE} = 0.0003 has no effect" in note for note in notes)


def test_the_command_line_says_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, drivetrain\n"
        "from torch import nn\n"
        "config = drivetrain.load_config(defaults={'global_batch_size': 8, 'max_steps': 2})\n"
        "x = torch.randn(32, 4)\n"
        "task = drivetrain.Task(\n"
        "    lambda: nn.Linear(4, 1), lambda model, batch: model(batch[0]).mean(),\n"
        "    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05))\n"
        "drivetrain.Trainer(task, config).fit(torch.utils.data.TensorDataset(x))\n"
    )
    words = [sys.executable, "-m", "drivetrain", "train", "--nproc-per-node=2", str(script)]
    done = subprocess.run(
        [*words, f"{RATE}=1e-3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == ConfigError.exit_code
    assert f"{RATE} = 0.001: set on the command line, but the script has its own" in done.stderr
