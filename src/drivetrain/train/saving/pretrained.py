"""A Hugging Face model's folder out of a model over the ranks: what `from_pretrained` reads.

Tensors are gathered one at a time, and rank 0 writes them file by file as they come: it holds one
file's at most, the others one tensor's.
"""

from __future__ import annotations

import copy
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drivetrain.checkpoint.companions import keep
from drivetrain.checkpoint.failures import reason
from drivetrain.checkpoint.storage import Storage
from drivetrain.checkpoint.weight_files import INDEX, WeightFiles
from drivetrain.core.errors import ConfigError, NotSaved, Problem
from drivetrain.parallel.model import Wanted, own_name, tensors_by_names
from drivetrain.train.assemble import Assembly
from drivetrain.train.weights.adapters import Merger, is_adapter, of_adapter, why_not_merged

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


def save_pretrained(
    assembly: Assembly,
    target: Path,
    beside: Iterable[Any],
    max_shard_bytes: int,
    *,
    merge_adapter: bool = False,
) -> None:
    """The model, and beside it what tokenizers and processors write. A collective call.

    What the folder has already stays, but for weights and what is written anew.
    """
    model = plain(assembly.engine.spread.inner)
    _refuse(model, merge_adapter=merge_adapter)
    is_main = assembly.world.is_main
    folder = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    problem = _attempt(lambda: folder.mkdir(parents=True)) if is_main else ""
    if is_adapter(model) and not merge_adapter:
        problem = _write_adapter(assembly, model, folder, problem)
    else:
        problem = _write_model(assembly, model, WeightFiles(folder, max_shard_bytes), problem)
    if is_main:
        problem = problem or _attempt(lambda: _finish(folder, target, beside))
        shutil.rmtree(folder, ignore_errors=True)
    if problem := assembly.world.agree(problem):
        raise NotSaved(
            f"the model could not be written to {target} ({problem}); make room, or see that it "
            "can be written"
        )


def _write_model(assembly: Assembly, model: nn.Module, files: WeightFiles, problem: str) -> str:
    """Weights and configuration; what went wrong on rank 0, if something did."""
    skipped = _second_names(model)
    put = Merger(model, files.add).add if is_adapter(model) else files.add
    problem = _gather(assembly, lambda name: name not in skipped, put, problem)
    if not assembly.world.is_main or problem:
        return problem

    def finish() -> None:
        files.finish()
        base: Any = model
        save_config(base.get_base_model() if is_adapter(model) else model, files.folder)

    return _attempt(finish)


def _write_adapter(assembly: Assembly, model: nn.Module, folder: Path, problem: str) -> str:
    """By its library, which knows what of it an adapter is; the frozen base is not gathered."""
    adapter: dict[str, torch.Tensor] = {}

    def take(name: str, tensor: torch.Tensor) -> None:
        adapter[name] = tensor.detach().to("cpu", copy=True)

    problem = _gather(assembly, of_adapter(model), take, problem)
    if not assembly.world.is_main or problem:
        return problem
    saved: Any = model
    return _attempt(lambda: saved.save_pretrained(folder, state_dict=adapter))


def _gather(
    assembly: Assembly, wanted: Wanted, put: Callable[[str, torch.Tensor], None], problem: str
) -> str:
    """Go through the tensors with all ranks; rank 0 does, too, when it cannot write any more."""
    for name, tensor in assembly.engine.spread.whole_tensors(wanted):
        if assembly.world.is_main and not problem and isinstance(tensor, torch.Tensor):
            problem = _attempt(partial(put, name, tensor))
    return problem


def _attempt(act: Callable[[], Any]) -> str:
    """What went wrong; the other ranks wait to be told."""
    try:
        act()
    except Exception as error:  # of the disk, of safetensors, of a tokenizer: all end the same way
        return reason(error)
    return ""


def _finish(folder: Path, target: Path, beside: Iterable[Any]) -> None:
    """The new files into their place: old weights first away, new ones' index last."""
    for each in beside:
        each.save_pretrained(folder)
    target.mkdir(parents=True, exist_ok=True)
    for old in target.iterdir():
        if old.name == INDEX or _WEIGHTS.fullmatch(old.name):
            old.unlink()
    # whoever reads meanwhile finds no index and no whole file, and says so
    written = sorted(folder.iterdir(), key=lambda p: (p.name == INDEX, p.name))
    for path in written:
        if path.is_dir():
            shutil.rmtree(target / path.name, ignore_errors=True)
        path.replace(target / path.name)


def plain(model: nn.Module) -> nn.Module:
    """The module itself, where torch.compile(model) has made another of it."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


def has_config(model: nn.Module) -> bool:
    """Whether it is one of Hugging Face's, which `from_pretrained` makes from its config."""
    is_theirs = hasattr(model, "save_pretrained") and not is_adapter(model)
    return is_theirs and hasattr(getattr(model, "config", None), "save_pretrained")


def save_config(model: Any, folder: Path) -> None:
    """config.json and generation_config.json."""
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    # a strategy may have made a class of torch's own out of the model's
    kinds = (kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch."))
    config.architectures = [next(kinds).__name__]
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def keep_companions(assembly: Assembly, storage: Storage) -> str:
    """What an export of a checkpoint needs beside it; why there is none, if that went wrong."""
    model = plain(assembly.engine.spread.inner)
    if not has_config(model):
        return ""

    def write() -> None:
        with tempfile.TemporaryDirectory() as name:
            save_config(model, Path(name))
            if assembly.tokenizer is not None:
                assembly.tokenizer.save_pretrained(name)
            keep(storage, Path(name))

    return _attempt(write)


def _refuse(model: nn.Module, *, merge_adapter: bool) -> None:
    rule, remedy = "", "use full_state_dict(), or `drivetrain checkpoint export`"
    if merge_adapter:
        rule = why_not_merged(model) if is_adapter(model) else "has no adapter of peft's to merge"
        remedy = "leave merge_adapter out; peft's merge_and_unload() merges what was saved"
    if getattr(model, "hf_quantizer", None) is not None:
        rule = "is quantized, and its weights cannot be gathered as they are"
    elif not has_config(model) and not is_adapter(model):
        rule = "is none of Hugging Face's: it has no config and save_pretrained"
    if rule:
        raise ConfigError([Problem("save_pretrained", rule, remedy, type(model).__name__)])


def _second_names(model: nn.Module) -> set[str]:
    """Of tensors that have several, all but the one that is looked for."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    skipped = set[str]()
    for names, _ in tensors_by_names(model):
        several = [own_name(name) for name in names]
        first = next((name for name in several if name not in tied), several[0])
        skipped |= set(several) - {first}
    return skipped
