"""Find the modules that hold a model's experts, and check whether they can be distributed.

The experts of a layer are one module: weights with one row per expert, a count `num_experts`, and
`forward(hidden_states, top_k_index, top_k_weights)`, which returns for each token the sum of its
experts' results. Hugging Face models are written this way (Mixtral, Qwen, DeepSeek, OLMoE …), and
your own model can be. Experts in another form are ignored or refused; nothing is guessed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from drivetrain.core.errors import ConfigError, Problem

_KEY = "parallel.expert.modules"
_FORM = "forward(hidden_states, top_k_index, top_k_weights)"
_AS_THEY_SHOULD = (
    f"keep them in one module with num_experts, weights with one row per expert, and {_FORM}"
)


@dataclass(frozen=True)
class Experts:
    """The experts of one layer."""

    name: str
    """The name of their module in the user's model."""
    module: nn.Module
    count: int


def find_experts(model: nn.Module, named: Sequence[str] = ()) -> list[Experts]:
    """Return the modules of experts; each pattern in `named` (`*`: a number) must match them."""
    modules = dict(model.named_modules())
    if not named:
        return [
            Experts(name, module, _count(module))
            for name, module in modules.items()
            if why_none(module) is None
        ]
    found: list[Experts] = []
    problems: list[Problem] = []
    for pattern in named:
        matching = [name for name in modules if matches(name, pattern)]
        if not matching:
            rule, remedy = "no module has this name", f"use {_likely(modules)}"
            problems.append(Problem(_KEY, rule, remedy, pattern))
        for name in matching:
            why = why_none(modules[name])
            if why is None:
                found.append(Experts(name, modules[name], _count(modules[name])))
            else:
                problems.append(Problem(_KEY, f"{name} {why}", _AS_THEY_SHOULD, pattern))
    if problems:
        raise ConfigError(problems[:5])
    return found


def matches(name: str, pattern: str) -> bool:
    """True if a module's name matches; `*` stands for a number."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None


def why_none(module: nn.Module) -> str | None:
    """Return why a module holds no experts, as the end of a sentence; None if it does."""
    count = getattr(module, "num_experts", None)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        return "has no positive num_experts"
    own = dict(module.named_parameters(recurse=False))
    if not any(weight.ndim == 3 for weight in own.values()):
        return "has no three-dimensional weight with one row per expert"
    if len(_places(module)) != 3:
        return f"does not have {_FORM}"
    return None


def _places(module: nn.Module) -> list[inspect.Parameter]:
    """Return the positional parameters of its forward."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        taken = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [each for each in taken if each.kind in kinds]


def _count(module: nn.Module) -> int:
    count = module.num_experts
    if not isinstance(count, int):
        raise TypeError("why_none() has looked at it")
    return count


def spread_problems(model: nn.Module, experts: Sequence[Experts], num_ranks: int) -> list[Problem]:
    """Return what prevents distributing these experts over `num_ranks` ranks."""
    if not experts:
        return [_nothing_found(model, num_ranks)]
    holders = _holders(model)
    return [
        problem
        for each in experts
        for problem in (
            *_count_problems(each, num_ranks),
            *_weight_problems(each, holders),
            *_part_problems(each),
        )
    ]


def refused_beside_pp(model: nn.Module) -> list[Problem]:
    """Refuse Hugging Face's balance loss over all layers: it would see only the last stage's."""
    if not getattr(getattr(model, "config", None), "output_router_logits", False):
        return []
    rule = "a pipeline's last stage cannot compute the balance loss over all layers' routers"
    remedy = "set it to false, or pp to 1"
    return [Problem("config.output_router_logits", rule, remedy, True)]


def _nothing_found(model: nn.Module, num_ranks: int) -> Problem:
    listed = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and "expert" in name.rpartition(".")[2].lower()
    ]
    rule = f"no experts were found in {type(model).__name__}"
    if listed:
        rule = f"the experts in {listed[0]} are separate modules, in a list"
    return Problem("parallel.ep", rule, _AS_THEY_SHOULD, num_ranks)


def _count_problems(experts: Experts, num_ranks: int) -> Iterator[Problem]:
    if experts.count % num_ranks:
        fitting = [str(n) for n in range(1, experts.count + 1) if experts.count % n == 0]
        yield Problem(
            "parallel.ep",
            f"does not divide the {experts.count} experts of {experts.name}",
            f"use one of {', '.join(fitting[-8:])}",
            num_ranks,
        )


def _weight_problems(experts: Experts, holders: dict[int, list[str]]) -> Iterator[Problem]:
    for name, weight in experts.module.named_parameters():
        path = f"{experts.name}.{name}"
        if "." in name or weight.ndim < 2 or weight.shape[0] != experts.count:
            rule = f"{path} does not have one row per expert: {tuple(weight.shape)}"
            remedy = "move what all experts share to another module"
            yield Problem("parallel.ep", rule, remedy, has_value=False)
        also = [other for other in holders[id(weight)] if other != path]
        if also:
            rule = f"{path} is the same weight as {also[0]}, and only one of them would be sharded"
            yield Problem("parallel.ep", rule, "untie them", has_value=False)


def _part_problems(experts: Experts) -> Iterator[Problem]:
    for name, _ in experts.module.named_buffers():
        rule = f"{experts.name}.{name} is a buffer, which each rank would change for its own tokens"
        remedy = "move it to a module outside the experts"
        yield Problem("parallel.ep", rule, remedy, has_value=False)
    for name, part in experts.module.named_modules():
        if isinstance(part, nn.Dropout) and part.p > 0:
            rule = (
                f"{experts.name}.{name} would drop different features on every layout, because "
                "experts see tokens in a different order"
            )
            remedy = "apply dropout before or after the experts"
            yield Problem("parallel.ep", rule, remedy, part.p)


def _holders(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter, by id."""
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    return names


def _likely(modules: dict[str, nn.Module]) -> str:
    found = [re.sub(r"\b\d+\b", "*", n) for n, m in modules.items() if why_none(m) is None]
    return " or ".join(dict.fromkeys(found)) or "the names of modules that hold experts"
