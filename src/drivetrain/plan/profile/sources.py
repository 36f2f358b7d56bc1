"""Create a subject from a script, a public architecture, a config.json or an import path."""

from __future__ import annotations

import difflib
import importlib
import json
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import nn

from drivetrain.config.provenance import ResolvedConfig
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.intercept import Intercepted, OwnLoopMet, intercepting
from drivetrain.core.requirements import require
from drivetrain.plan.profile.subject import Subject, causal_lm_loss, token_batch

# ResNet-50, for plans by name: only the architecture, no weights.


class Bottleneck(nn.Module):
    """Three convolutions with a residual connection."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.conv1 = nn.Conv2d(before, width, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.conv3 = nn.Conv2d(width, after, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.norm3 = nn.BatchNorm2d(after)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            conv = nn.Conv2d(before, after, 1, stride, bias=False)
            self.skip = nn.Sequential(conv, nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.skip(x))


class ResNet50(nn.Module):
    """He et al. 2015."""

    def __init__(self, classes: int = 1000, depths: tuple[int, ...] = (3, 4, 6, 3)) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks: list[nn.Module] = []
        before = 64
        for level, depth in enumerate(depths):
            width = 64 * 2**level
            for index in range(depth):
                stride = 2 if level and index == 0 else 1
                blocks.append(Bottleneck(before, width, stride))
                before = 4 * width
        self.stages = nn.Sequential(*blocks)
        self.head = nn.Linear(before, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.stages(self.stem(x)).mean((2, 3)))
        return logits


@dataclass(frozen=True)
class Found:
    """A subject, and the run's config if it comes from a script."""

    subject: Subject
    resolved: ResolvedConfig | None = None


def find_subject(said: str, argv: Sequence[str] = (), sequence_length: int | None = None) -> Found:
    """Return the subject of a `script.py`, a name (llama-3-70b), a .json or `module:function`."""
    if said.endswith(".py"):
        return from_script(said, argv)
    if said.endswith(".json"):
        return Found(_from_json(Path(said), sequence_length))
    if ":" in said:
        return Found(_from_import(said))
    if said in architectures():
        return Found(from_architecture(said, sequence_length))
    near = difflib.get_close_matches(said, architectures(), n=1)
    remedy = f"did you mean {near[0]}?" if near else "give a script, config.json or module:function"
    raise ConfigError([Problem("MODEL", "unknown model", remedy, said)])


@cache
def architectures() -> dict[str, dict[str, Any]]:
    """Return the public architectures by name."""
    text = Path(__file__).with_name("architectures.yaml").read_text(encoding="utf-8")
    known: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return known


def from_architecture(name: str, sequence_length: int | None = None) -> Subject:
    """Return the subject of a public model, created from its hyperparameters."""
    numbers = {k: v for k, v in architectures()[name].items() if k != "source"}
    kind = numbers.pop("kind")
    if kind == "resnet":
        return _images(name, int(numbers["image"]), int(numbers["classes"]))
    return _hugging_face(name, {"model_type": kind, **numbers}, sequence_length)


def _from_json(path: Path, sequence_length: int | None) -> Subject:
    try:
        numbers = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problem = Problem("MODEL", f"cannot be read ({error})", "give a config.json", str(path))
        raise ConfigError([problem]) from error
    return _hugging_face(path.parent.name or path.stem, numbers, sequence_length)


def _hugging_face(name: str, numbers: dict[str, Any], sequence_length: int | None) -> Subject:
    transformers = require("transformers", extra="plan")
    config = transformers.AutoConfig.for_model(
        **{
            "use_cache": False,
            "tie_word_embeddings": numbers.get("model_type") == "bert",
            **numbers,
        }
    )
    is_masked = config.model_type == "bert"
    kind = transformers.AutoModelForMaskedLM if is_masked else transformers.AutoModelForCausalLM
    longest = getattr(config, "max_position_embeddings", None) or config.n_positions
    length = sequence_length or int(longest)
    return Subject(
        name=name,
        model=lambda: kind.from_config(config),
        loss=_masked_loss if is_masked else causal_lm_loss,
        batch=token_batch(config.vocab_size, length),
        tokens_per_sample=length,
        varies_length=True,
    )


def _masked_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(input_ids=batch[0]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten())


def _images(name: str, side: int, classes: int) -> Subject:
    def batch(samples: int, length: float) -> Any:  # noqa: ARG001 - an image has no length
        return torch.zeros(samples, 3, side, side), torch.zeros(samples, dtype=torch.int64)

    def loss(model: nn.Module, pair: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(pair[0]), pair[1])

    return Subject(name, lambda: ResNet50(classes), loss, batch)


def _from_import(said: str) -> Subject:
    module, _, name = said.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        made = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError) as error:
        problem = Problem("MODEL", f"cannot be imported ({error})", "give module:function", said)
        raise ConfigError([problem]) from error
    finally:
        sys.path.pop(0)
    if not isinstance(made, Subject):
        rule = f"returns a {type(made).__name__}, not a drivetrain.plan.profile.subject.Subject"
        raise ConfigError([Problem("MODEL", rule, "return a Subject", said)])
    return made


def from_script(path: str, argv: Sequence[str] = ()) -> Found:
    """Run the script up to `Trainer.fit`, and return what it was about to train."""
    if not Path(path).is_file():
        raise ConfigError([Problem("SCRIPT", "no such file", "give the path of a script", path)])
    before, where = sys.argv, str(Path(path).resolve().parent)
    sys.argv = [path, *argv]
    sys.path.insert(0, where)
    try:
        with intercepting():
            runpy.run_path(path, run_name="__main__")
    except Intercepted as caught:
        return Found(_subject_of(Path(path).stem, caught), caught.resolved)
    except OwnLoopMet:
        rule = "trains in its own loop (prepare), which cannot be planned"
        remedy = (
            "use Trainer.fit, or describe one step (model, loss, batch) in a function of your own "
            'and plan that, as docs/planning.md shows under "A script with its own loop"'
        )
        raise ConfigError([Problem("SCRIPT", rule, remedy, path)]) from None
    finally:
        sys.argv = before
        sys.path.remove(where)
    rule = "ended without calling Trainer.fit"
    raise ConfigError([Problem("SCRIPT", rule, "plan needs the Trainer's task and data", path)])


def _subject_of(name: str, caught: Intercepted) -> Subject:
    task, optimization = caught.task, caught.resolved.config.optimization

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = task.make_optimizer(model, optimization)
        return made

    def batch(samples: int, length: float) -> Any:  # noqa: ARG001 - the data says how long it is
        return caught.batch(samples)

    first = caught.batch(1)
    return Subject(
        name,
        task.model,
        task.loss,
        batch,
        optimizer,
        tokens_per_sample=_sequence_length(first),
        expert_imbalance=caught.resolved.config.parallel.expert.imbalance,
    )


def _sequence_length(batch: Any) -> int | None:
    """Return the length of the first two-dimensional tensor of integers, which are tokens."""
    from torch.utils._pytree import tree_leaves

    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 2 and not leaf.is_floating_point():
            return int(leaf.shape[1])
    return None
