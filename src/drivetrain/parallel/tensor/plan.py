"""Where a tensor-parallel plan comes from, and whether it divides the model.

A plan says for each layer how its weight is cut: `colwise` (by its outputs; what follows works on a
part of the features), `rowwise` (by its inputs, which are such a part; the results are added up),
`colwise_gather` (by its outputs, which are put together again: the last layer), `embedding` (by the
rows of its table). Names may hold `*` for a number.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from drivetrain.core.errors import ConfigError, Problem

STYLES = ("colwise", "rowwise", "colwise_gather", "embedding", "replicate")
# as Hugging Face calls them
_SAME_AS = {
    "colwise_gather_output": "colwise_gather",
    "colwise_rep": "colwise_gather",
    "embedding_rowwise": "embedding",
    "local_colwise": "colwise",
    "local_rowwise": "rowwise",
}
_KEY = "parallel.tensor.plan"
# attributes under which attention modules and configs keep the number of their heads
_HEADS = ("heads", "num_heads", "n_head", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class Cut:
    """One layer and how it is cut."""

    name: str
    style: str


def plan_for(model: nn.Module, said: str | tuple[str, ...], num_ranks: int) -> list[Cut]:
    """The cuts of this model; ConfigError when there is no plan, or it does not fit."""
    plan = _spoken(said) if not isinstance(said, str) else _found(model, said)
    modules = dict(model.named_modules())
    cuts: list[Cut] = []
    problems: list[Problem] = []
    for pattern, word in plan.items():
        style = _SAME_AS.get(word, word)
        if style not in STYLES:
            problems.append(Problem(_KEY, f"{pattern} is cut in an unknown way", _ways(), style))
            continue
        named = [name for name in modules if _matches(name, pattern)]
        if not named:
            problems.append(Problem(_KEY, "no module has this name", _names(modules), pattern))
        cuts += [Cut(name, style) for name in named if style != "replicate"]
    problems = [*_head_problems(model, num_ranks), *problems]
    problems += [p for cut in cuts for p in _size_problems(cut, modules[cut.name], num_ranks)]
    if problems:
        raise ConfigError(problems[:5])
    return cuts


def _spoken(lines: tuple[str, ...]) -> dict[str, str]:
    wrong = [line for line in lines if "=" not in line]
    if wrong:
        remedy = "write module=colwise"
        raise ConfigError([Problem(_KEY, "is no plan", remedy, line) for line in wrong])
    return dict(line.split("=", 1) for line in lines)


def _found(model: nn.Module, said: str) -> Mapping[str, str]:
    if ":" in said:
        module, _, name = said.partition(":")
        try:
            made: Mapping[str, str] = getattr(importlib.import_module(module), name)(model)
        except (ImportError, AttributeError) as error:
            problem = Problem(_KEY, f"cannot be had ({error})", "write module:function", said)
            raise ConfigError([problem]) from error
        return made
    plan = dict(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {})
    if said != "model" or not plan:
        rule = f"{type(model).__name__} has no tp_plan of its own"
        remedy = "give it a `tp_plan` dict, or set this to module:function or to a list"
        raise ConfigError([Problem(_KEY, rule, remedy, said)])
    return plan


def _matches(name: str, pattern: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None


def _size_problems(cut: Cut, module: nn.Module, num_ranks: int) -> list[Problem]:
    if isinstance(module, nn.Embedding) and cut.style == "embedding":
        size, side = module.num_embeddings, "rows"
    elif isinstance(module, nn.Linear) and cut.style == "rowwise":
        size, side = module.in_features, "inputs"
    elif isinstance(module, nn.Linear) and cut.style != "embedding":
        size, side = module.out_features, "outputs"
    else:
        kind = type(module).__name__
        remedy = "cut nn.Linear and nn.Embedding only, or leave this one out"
        rule = f"{cut.name} is a {kind}, which cannot be cut that way"
        return [Problem(_KEY, rule, remedy, cut.style)]
    if size % num_ranks == 0:
        return []
    return [
        Problem(
            "parallel.tp",
            f"does not divide the {size} {side} of {cut.name}",
            f"use {_divisors(size)}",
            num_ranks,
        )
    ]


def _head_problems(model: nn.Module, num_ranks: int) -> list[Problem]:
    """Attention is cut between heads, never through one."""
    seen: dict[str, int] = {}
    for thing in (getattr(model, "config", None), *model.modules()):
        for name in _HEADS:
            value: Any = getattr(thing, name, None)
            if isinstance(value, int) and value % num_ranks:
                seen[name] = value
    return [
        Problem(
            "parallel.tp",
            f"does not divide the model's {value} {name}",
            f"use {_divisors(value)}",
            num_ranks,
        )
        for name, value in seen.items()
    ]


def _divisors(size: int) -> str:
    fitting = [str(n) for n in range(1, min(size, 64) + 1) if size % n == 0]
    return " or ".join([", ".join(fitting[:-1]), fitting[-1]] if len(fitting) > 1 else fitting)


def _ways() -> str:
    return f"use {', '.join(STYLES[:-1])} or {STYLES[-1]}"


def _names(modules: Mapping[str, nn.Module]) -> str:
    linear = [re.sub(r"\b\d+\b", "*", n) for n, m in modules.items() if isinstance(m, nn.Linear)]
    return f"its linear layers are {', '.join(dict.fromkeys(linear))}"
