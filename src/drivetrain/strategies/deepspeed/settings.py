"""Build DeepSpeed's config from a run's config and the user's own DeepSpeed settings.

Only the run's config decides what affects a step's numbers (batch, accumulation, clipping,
optimizer, schedule, number format). A file may repeat these settings, set them to "auto" or omit
them; contradictions are problems that name both values. All other settings are passed through.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import Problem
from drivetrain.strategies.deepspeed import DeepSpeed
from drivetrain.strategies.strategy import Profile

Settings = dict[str, Any]
OFFLOADS = ("offload_optimizer", "offload_param")
_WHERE = "parallel.deepspeed.config"
_OPEN = "auto"
_RUNS_OWN = {
    "optimizer": "the task sets the optimizer",
    "scheduler": "optimization.lr_scheduler_type sets the schedule",
}
_PREFETCH = "stage3_prefetch_bucket_size"
_PRECISIONS = ("fp16", "bf16", "torch_autocast")


@dataclass(frozen=True)
class Merged:
    """The settings passed to DeepSpeed, and the problems that prevent it."""

    settings: Settings
    problems: tuple[Problem, ...]

    @property
    def stage(self) -> int:
        return int(self.settings["zero_optimization"]["stage"])

    def offload(self, what: str) -> str:
        """Return the device of `offload_optimizer` or `offload_param`: none, cpu or nvme."""
        return str(self._section(what).get("device", "none"))

    def folder(self, what: str) -> str | None:
        """Return the directory for offload to a disk."""
        return self._section(what).get("nvme_path")

    def _section(self, what: str) -> Settings:
        return self.settings["zero_optimization"].get(what) or {}


def merge(config: RunConfig, accumulation: int, profile: Profile) -> Merged:
    """Return the user's settings, if any, overridden by what the run decides."""
    given = config.parallel.details(DeepSpeed).config
    theirs = _read(given) if isinstance(given, Path) else given or {}
    if isinstance(theirs, Problem):
        return Merged({"zero_optimization": {"stage": 2}}, (theirs,))
    ours = _ours(config, accumulation, theirs.get("zero_optimization", {}), profile)
    problems = [
        *_contradictions(theirs, ours),
        *_not_theirs(theirs, config),
        *_batch_size(theirs, config),
    ]
    settings = _without_open({k: v for k, v in theirs.items() if k not in _PRECISIONS})
    # DeepSpeed computes it as a product, which is wrong where a rank has fewer micro-batches
    settings.pop("train_batch_size", None)
    merged = Merged(_laid_over(settings, ours), ())
    return Merged(merged.settings, tuple(problems or _impossible(merged)))


def _read(path: Path) -> Settings | Problem:
    try:
        read = json.loads(path.read_text())
    except OSError as error:
        return Problem(_WHERE, f"cannot be read ({error.strerror})", "give a JSON file", str(path))
    except json.JSONDecodeError as error:
        return Problem(_WHERE, f"is not valid JSON ({error})", "fix the file", str(path))
    if not isinstance(read, dict):
        return Problem(_WHERE, "is not a JSON object", "see DeepSpeed's config", str(path))
    return read


def _ours(config: RunConfig, accumulation: int, zero: Settings, profile: Profile) -> Settings:
    """Return what the run decides; `zero` is the file's section, for what the run leaves open."""
    run = config.parallel.details(DeepSpeed)
    said = _said(zero.get("stage"))
    ours_zero: Settings = {"stage": run.zero_stage or (2 if said is None else said)}
    for name in OFFLOADS:
        if section := _offload(name, run, zero, profile):
            ours_zero[name] = section
    if _device("offload_param", run, zero) == "nvme" and _said(zero.get(_PREFETCH)) is None:
        ours_zero[_PREFETCH] = 0
    if _said(zero.get("reduce_bucket_size")) is None:
        # DeepSpeed allocates a buffer of that many elements; its 500 million suit large models
        ours_zero["reduce_bucket_size"] = max(1, min(500_000_000, profile.gradient_bytes // 4))
    settings: Settings = {
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        # always set: DeepSpeed's default is to clip to 1
        "gradient_clipping": config.optimization.max_grad_norm or 0.0,
        "zero_allow_untested_optimizer": True,
        # the task's own optimizer also works on the host; DeepSpeed's would have to be compiled
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": ours_zero,
    }
    if config.precision.dtype == "bf16":
        # weights stay fp32, as with the other strategies; with an empty list gradients do too
        settings["torch_autocast"] = {
            "enabled": True,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        }
    return settings


def _device(name: str, run: DeepSpeed, zero: Settings) -> str | None:
    said: str | None = _said((zero.get(name) or {}).get("device"))
    return getattr(run, name) or said


def _offload(name: str, run: DeepSpeed, zero: Settings, profile: Profile) -> Settings:
    """Return the device and, for a disk, the directory and buffer size."""
    ours: Settings = {}
    if getattr(run, name) is not None:
        ours["device"] = getattr(run, name)
    if _device(name, run, zero) != "nvme":
        return ours
    if run.nvme_path is not None:
        ours["nvme_path"] = str(run.nvme_path)
    if name == "offload_param" and _said((zero.get(name) or {}).get("buffer_size")) is None:
        # DeepSpeed pins five buffers of that many elements; with its default they take 2 GB
        ours["buffer_size"] = max(1, min(100_000_000, profile.num_parameters))
    return ours


def _said(value: Any) -> Any:
    return None if value == _OPEN else value


def _contradictions(theirs: Settings, ours: Settings, prefix: str = "") -> Iterator[Problem]:
    for key, value in ours.items():
        said = _said(theirs.get(key))
        if said is None or key in _PRECISIONS:
            continue
        if isinstance(value, dict) and isinstance(said, dict):
            yield from _contradictions(said, value, f"{prefix}{key}.")
        elif said != value:
            yield Problem(
                f"{_WHERE}: {prefix}{key}",
                f"the run's config has {value!r}",
                f'set it in the run\'s config and remove it there, or write "{_OPEN}"',
                said,
            )


def _not_theirs(theirs: Settings, config: RunConfig) -> Iterator[Problem]:
    for key, rule in _RUNS_OWN.items():
        if _said(theirs.get(key)) is not None:
            yield Problem(f"{_WHERE}: {key}", rule, "remove it there", theirs[key])
    for key in _PRECISIONS:
        section = theirs.get(key)
        if isinstance(section, dict) and _said(section.get("enabled")):
            yield Problem(
                f"{_WHERE}: {key}.enabled",
                f"the run's precision.dtype is {config.precision.dtype}",
                "set precision.dtype (fp32 weights under autocast) and remove it there",
                section["enabled"],
            )


def _batch_size(theirs: Settings, config: RunConfig) -> Iterator[Problem]:
    said = _said(theirs.get("train_batch_size"))
    if said is not None and said != config.global_batch_size:
        yield Problem(
            f"{_WHERE}: train_batch_size",
            f"the run's global_batch_size is {config.global_batch_size}",
            f'make them the same, or write "{_OPEN}"',
            said,
        )


def _impossible(merged: Merged) -> Iterator[Problem]:
    """Yield problems that only the file and the config together show."""
    if merged.stage not in (1, 2, 3):
        yield Problem(
            f"{_WHERE}: zero_optimization.stage",
            "ZeRO has stages 1, 2 and 3",
            "use one of them, or parallel.strategy=ddp",
            merged.stage,
        )
    if merged.offload("offload_param") != "none" and merged.stage != 3:
        yield Problem(
            "parallel.deepspeed.offload_param",
            f"stage {merged.stage} keeps a full copy of the weights on every device",
            "use zero_stage=3",
            merged.offload("offload_param"),
        )
    if merged.offload("offload_optimizer") == "nvme" and merged.stage != 3:
        yield Problem(
            "parallel.deepspeed.offload_optimizer",
            f"DeepSpeed offloads to a disk only at stage 3, not {merged.stage}",
            "use zero_stage=3, or cpu",
            "nvme",
        )

    prefetch = merged.settings["zero_optimization"].get(_PREFETCH)
    if merged.offload("offload_param") == "nvme" and prefetch:
        yield Problem(
            f"{_WHERE}: zero_optimization.{_PREFETCH}",
            "when prefetching weights from a disk, DeepSpeed requests one twice and fails",
            "remove it there, or offload weights to cpu",
            prefetch,
        )
    for what in OFFLOADS:
        if merged.offload(what) == "nvme" and not merged.folder(what):
            yield Problem(
                f"{_WHERE}: zero_optimization.{what}",
                "offload to nvme needs a directory",
                "set parallel.deepspeed.nvme_path to one on the disk to use",
                has_value=False,
            )


def _without_open(settings: Settings) -> Settings:
    return {
        key: _without_open(value) if isinstance(value, dict) else value
        for key, value in settings.items()
        if value != _OPEN
    }


def _laid_over(below: Settings, above: Settings) -> Settings:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        is_section = isinstance(value, dict) and isinstance(under, dict)
        merged[key] = _laid_over(under, value) if is_section else value  # type: ignore[arg-type]
    return merged
