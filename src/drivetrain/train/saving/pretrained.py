"""Write a distributed model as a Hugging Face folder for `from_pretrained`.

Tensors are gathered one at a time, and rank 0 writes them file by file: it holds at most the
tensors of one file, the other ranks at most one tensor.
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
    """Write the model and the files of tokenizers and processors. A collective call.

    Existing files of the folder stay, except weights and files that are written again.
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
            f"the model could not be written to {target} ({problem}); free some space, or make it "
            "writable"
        )


def _write_model(assembly: Assembly, model: nn.Module, files: WeightFiles, problem: str) -> str:
    """Write weights and config; return rank 0's error, or an empty string."""
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
    """Write the adapter with its library; the frozen base model is not gathered."""
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
    """Gather the tensors with all ranks; rank 0 takes part even after it failed to write."""
    for name, tensor in assembly.engine.spread.whole_tensors(wanted):
        if assembly.world.is_main and not problem and isinstance(tensor, torch.Tensor):
            problem = _attempt(partial(put, name, tensor))
    return problem


def _attempt(act: Callable[[], Any]) -> str:
    """Return the error as text, so that it can be sent to the other ranks."""
    try:
        act()
    except Exception as error:  # from the disk, safetensors or a tokenizer
        return reason(error)
    return ""


def _finish(folder: Path, target: Path, beside: Iterable[Any]) -> None:
    """Move the new files into place: remove old weights first, move the new index last."""
    for each in beside:
        each.save_pretrained(folder)
    target.mkdir(parents=True, exist_ok=True)
    for old in target.iterdir():
        if old.name == INDEX or _WEIGHTS.fullmatch(old.name):
            old.unlink()
    # a reader meanwhile finds no index and no complete file, and fails
    written = sorted(folder.iterdir(), key=lambda p: (p.name == INDEX, p.name))
    for path in written:
        if path.is_dir():
            shutil.rmtree(target / path.name, ignore_errors=True)
        path.replace(target / path.name)


def plain(model: nn.Module) -> nn.Module:
    """Return the module inside a wrapper that torch.compile(model) made."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


def has_config(model: nn.Module) -> bool:
    """True for a Hugging Face model, which `from_pretrained` builds from its config."""
    is_theirs = hasattr(model, "save_pretrained") and not is_adapter(model)
    return is_theirs and hasattr(getattr(model, "config", None), "save_pretrained")


def save_config(model: Any, folder: Path) -> None:
    """Write config.json and generation_config.json."""
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    # a strategy may have replaced the model's class with one of torch's
    kinds = (kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch."))
    config.architectures = [next(kinds).__name__]
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def keep_companions(assembly: Assembly, storage: Storage) -> str:
    """Keep the files that an export of a checkpoint needs; return the error, or an empty string."""
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
        rule = why_not_merged(model) if is_adapter(model) else "has no peft adapter to merge"
        remedy = "leave merge_adapter out; peft's merge_and_unload() merges what was saved"
    if getattr(model, "hf_quantizer", None) is not None:
        rule = "is quantized, and quantized weights cannot be gathered"
    elif not has_config(model) and not is_adapter(model):
        rule = "is not a Hugging Face model: it lacks save_pretrained or a config"
    if rule:
        raise ConfigError([Problem("save_pretrained", rule, remedy, type(model).__name__)])


def _second_names(model: nn.Module) -> set[str]:
    """Return the names of tied tensors that are not written: all but one for each."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    skipped = set[str]()
    for names, _ in tensors_by_names(model):
        several = [own_name(name) for name in names]
        first = next((name for name in several if name not in tied), several[0])
        skipped |= set(several) - {first}
    return skipped
