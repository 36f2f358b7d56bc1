"""Rules between keys. Each is a pure function that yields every problem it finds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import Problem
from drivetrain.core.redaction import clean_address
from drivetrain.core.text import plain
from drivetrain.core.traits import Feature, Rule, all_traits, with_feature


def _length(config: RunConfig) -> Iterator[Problem]:
    if config.max_steps is None and config.num_train_epochs is None:
        yield Problem(
            "max_steps",
            "the run has no end",
            "set max_steps, or num_train_epochs",
            has_value=False,
        )


def _name(config: RunConfig) -> Iterator[Problem]:
    """A run's directory must be inside output_dir, and its name must be safe on terminals."""
    name = config.name or ""
    parts = PurePosixPath(name).parts
    if name.startswith("/") or name == "." or ".." in parts:
        yield Problem("name", "points outside output_dir", "use a plain name", name)
    elif plain(name) != name or any(len(part.encode()) > 200 for part in parts):
        yield Problem("name", "not a directory name", "use up to 200 plain characters", plain(name))


def _contents(config: RunConfig) -> Iterator[Problem]:
    if config.checkpoint.contents == "trained" and config.parallel.pp > 1:
        rule = "a pipeline's stages do not know each other's frozen weights"
        yield Problem("checkpoint.contents", rule, "use everything, or pp = 1", "trained")


def _batch_norm(config: RunConfig) -> Iterator[Problem]:
    if not config.parallel.sync_batch_norm:
        return
    for axis in ("tp", "pp", "cp"):
        if getattr(config.parallel, axis) > 1:
            rule = f"statistics are computed over replicas of whole layers, but {axis} splits them"
            yield Problem("parallel.sync_batch_norm", rule, f"set {axis} to 1", "true")
    if config.reproducibility == "bitwise":
        rule = "the rounding of sums over ranks depends on the number of ranks"
        yield Problem("parallel.sync_batch_norm", rule, "use reproducibility = standard", "true")
    if config.fault_tolerance == "live":
        rule = "a lost replica would leave the others waiting in their forward pass"
        yield Problem("parallel.sync_batch_norm", rule, "leave it out", "true")


def _warmup(config: RunConfig) -> Iterator[Problem]:
    warmup = config.optimization.warmup_steps
    if config.max_steps is not None and warmup > config.max_steps:
        yield Problem(
            "optimization.warmup_steps",
            f"longer than the run, which is {config.max_steps} steps",
            f"use at most {config.max_steps}",
            warmup,
        )


_LEVEL = ("constant", "inverse_sqrt", "none")


def _schedule(config: RunConfig) -> Iterator[Problem]:
    said, run = config.optimization, config.max_steps
    shape = said.lr_scheduler_type
    if said.warmup_ratio and said.warmup_steps:
        yield Problem(
            "optimization.warmup_ratio",
            f"warmup_steps = {said.warmup_steps} is set as well",
            "set one of the two",
            said.warmup_ratio,
        )
    if said.decay_steps is not None and shape in _LEVEL:
        yield Problem(
            "optimization.decay_steps",
            f"lr_scheduler_type = {shape} has no decay phase",
            "use linear, cosine or wsd, or leave it out",
            said.decay_steps,
        )
    if shape == "wsd" and run is not None and said.decay_steps is not None:
        level = run - said.warmup_steps
        if said.decay_steps > level:
            yield Problem(
                "optimization.decay_steps",
                f"only {level} of the run's {run} steps are left after the warm-up",
                f"use at most {level}",
                said.decay_steps,
            )
    touched = {
        "warmup_steps": said.warmup_steps,
        "warmup_ratio": said.warmup_ratio,
        "learning_rate_scaling": "" if said.learning_rate_scaling == "none" else "x",
    }
    for key in (key for key, value in touched.items() if value and shape == "none"):
        yield Problem(
            f"optimization.{key}",
            "lr_scheduler_type = none never changes the rate",
            "use constant, or leave it out",
            getattr(said, key),
        )


def _scaling(config: RunConfig) -> Iterator[Problem]:
    optimization = config.optimization
    if optimization.learning_rate_scaling != "none" and optimization.base_batch_size is None:
        yield Problem(
            "optimization.learning_rate_scaling",
            "scaling needs the batch size the rate was tuned for",
            "set optimization.base_batch_size",
            optimization.learning_rate_scaling,
        )


def _best(config: RunConfig) -> Iterator[Problem]:
    if config.checkpoint.keep_best is not None and config.checkpoint.every_steps is None:
        yield Problem(
            "checkpoint.keep_best",
            "nothing is saved with every_steps = null",
            "set checkpoint.every_steps, or leave it out",
            config.checkpoint.keep_best,
        )


def _pretrained(config: RunConfig) -> Iterator[Problem]:
    said = config.model
    if said.pretrained_allow and said.pretrained is None:
        yield Problem(
            "model.pretrained_allow",
            "applies to model.pretrained, which is not set",
            "set model.pretrained, or leave it out",
            list(said.pretrained_allow),
        )
    pipeline = config.parallel.pipeline
    if said.pretrained is not None and config.parallel.pp > 1 and pipeline.balance == "time":
        yield Problem(
            "parallel.pipeline.balance",
            "timing needs a whole model, but pretrained weights are read part by part",
            "use parameters",
            "time",
        )


_LARGEST_TRIED = 100_000


def _micro_batch(config: RunConfig) -> Iterator[Problem]:
    micro = config.micro_batch_size
    if micro == "auto":
        if config.reproducibility == "bitwise":
            yield Problem(
                "micro_batch_size",
                "bitwise runs need micro-batches that do not change with the number of ranks",
                f"set a number that divides {config.global_batch_size}",
                micro,
            )
        return
    if micro < 1:
        yield Problem("micro_batch_size", "must be at least 1", "use a positive number", micro)
    elif config.global_batch_size % micro:
        whole = config.global_batch_size
        yield Problem(
            "micro_batch_size",
            f"does not divide global_batch_size = {whole}",
            f"use one of {divisors_near(whole, micro)}, or set global_batch_size to "
            f"{multiples_near(whole, micro)}",
            micro,
        )


def divisors_near(whole: int, wanted: int, largest: float = math.inf, most: int = 4) -> str:
    """Return the divisors of a batch size that are nearest to a size, for a message."""
    # of each pair of divisors one is at most the root; for huge numbers not all are searched
    below = [d for d in range(1, min(math.isqrt(whole), _LARGEST_TRIED) + 1) if whole % d == 0]
    divisors = {d for d in (*below, *(whole // d for d in below)) if d <= largest}
    nearest = sorted(sorted(divisors, key=lambda d: (abs(d - wanted), d))[:most])
    return ", ".join(map(str, nearest))


def multiples_near(whole: int, part: int) -> str:
    """Return the multiples of `part` on both sides of a batch size, for a message."""
    below = whole // part * part
    return f"{below} or {below + part}" if below else str(part)


def _axes(config: RunConfig) -> Iterator[Problem]:
    parallel = config.parallel
    for name in ("dp_replicate", "dp_shard"):
        size = getattr(parallel, name)
        if size != "auto" and size < 1:
            yield Problem(
                f"parallel.{name}", "must be at least 1", "use a positive number, or auto", size
            )
    if not parallel.traits.shards and parallel.dp_shard not in ("auto", 1):
        sharding = next(each.name for each in all_traits() if each.shards)
        yield Problem(
            "parallel.dp_shard",
            f"{parallel.strategy} keeps a full copy on every rank",
            f"use parallel.strategy={sharding}, or leave it out",
            parallel.dp_shard,
        )


def _dividing_axes(config: RunConfig) -> dict[Feature, int]:
    """Return the axes that split the model itself and have more than one rank, with their sizes."""
    sizes: dict[Feature, int] = {
        "tp": config.parallel.tp,
        "pp": config.parallel.pp,
        "cp": config.parallel.cp,
        "ep": config.parallel.ep,
    }
    return {axis: size for axis, size in sizes.items() if size > 1}


def _divided(config: RunConfig) -> Iterator[Problem]:
    """Check what can be combined with tp, pp, cp and ep."""
    parallel = config.parallel
    axes = _dividing_axes(config)
    if not axes:
        return
    for axis, size in axes.items():
        if axis not in parallel.traits.combines_with:
            yield Problem(
                f"parallel.{axis}",
                f"cannot be combined with {parallel.strategy}",
                f"use parallel.strategy={with_feature(axis)}",
                size,
            )
    axis = next(iter(axes))
    if config.precision.dtype == "fp16":
        yield Problem(
            "precision.dtype",
            f"the fp16 loss scaler does not see overflows on other {axis} ranks",
            "use bf16",
            "fp16",
        )
    if config.fault_tolerance == "live":
        yield Problem(
            "fault_tolerance",
            f"cannot be combined with {axis}",
            "use restart",
            "live",
        )


def _pipeline(config: RunConfig) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.pp == 1:
        return
    beside = {
        "parallel.tensor.loss_parallel": (parallel.tensor.loss_parallel, False),
        "parallel.tensor.sequence_parallel": (parallel.tensor.sequence_parallel, False),
        "parallel.cp": (parallel.cp, 1),
        "compile.enabled": (config.compile.enabled, False),
    }
    for key, (value, off) in beside.items():
        if value != off:
            yield Problem(key, "cannot be combined with pp yet", f"set it to {off}", value)


def _offload(config: RunConfig) -> Iterator[Problem]:
    if config.memory.offload == "cpu" and not _combines(config, "offload"):
        able = with_feature("offload")
        yield Problem(
            "memory.offload",
            f"needs {able}, but the strategy is {config.parallel.strategy}",
            f"use parallel.strategy={able}, or none",
            "cpu",
        )


def _bitwise(config: RunConfig) -> Iterator[Problem]:
    if config.reproducibility != "bitwise":
        return
    if not _combines(config, "bitwise"):
        able = with_feature("bitwise")
        yield Problem(
            "reproducibility",
            f"bitwise results need parallel.strategy={able}, not {config.parallel.strategy}",
            f"use {able}, or reproducibility=standard",
            "bitwise",
        )
    for axis, size in _dividing_axes(config).items():
        yield Problem(
            f"parallel.{axis}",
            "sums split over ranks are not equal bit for bit",
            "use 1, or reproducibility=standard",
            size,
        )
    if config.data.iterable_sharding != "same_stream":
        yield Problem(
            "data.iterable_sharding",
            "shards per rank make the batches depend on the number of ranks",
            "use same_stream, or reproducibility=standard",
            config.data.iterable_sharding,
        )
    mode = config.compile.mode
    if config.compile.enabled and mode is not None and mode.startswith("max-autotune"):
        yield Problem(
            "compile.mode",
            "kernels chosen by timing differ from rank to rank, and so do their results",
            "leave it out, or use reproducibility=standard",
            mode,
        )


def _compression(config: RunConfig) -> Iterator[Problem]:
    compression = config.communication.compression
    if compression == "none":
        return
    able = with_feature("compression")
    refused = {
        f"parallel.strategy={config.parallel.strategy}": not _combines(config, "compression"),
        "reproducibility=bitwise": config.reproducibility == "bitwise",
        "fault_tolerance=live": config.fault_tolerance == "live",
    }
    for setting in (name for name, is_set in refused.items() if is_set):
        yield Problem(
            "communication.compression",
            f"gradient compression works only with plain {able}, not with {setting}",
            f"use none, or plain {able}",
            compression,
        )
    may_be = config.communication.allow if compression == "auto" else (compression,)
    if config.precision.dtype == "fp16" and {"powersgd", "topk"} & set(may_be):
        yield Problem(
            "communication.compression",
            "each step's residual is carried over to the next, so an fp16 overflow would stay",
            "use precision.dtype=bf16, or compression fp16 or bf16",
            compression,
        )


def _combines(config: RunConfig, feature: Feature) -> bool:
    return feature in config.parallel.traits.combines_with


_AXES = ("parallel.strategy", "parallel.tp", "parallel.pp", "parallel.cp", "parallel.ep")


def _experts(config: RunConfig) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.ep == 1:
        return
    shard = parallel.dp_shard
    if shard != "auto" and shard >= 1 and shard % parallel.ep:
        rule = f"does not divide dp_shard = {shard}, of which it is a part"
        yield Problem("parallel.ep", rule, f"use one of {divisors_near(shard, 1)}", parallel.ep)
    beside = {
        "parallel.cp": (parallel.cp, 1),
        "parallel.tensor.sequence_parallel": (parallel.tensor.sequence_parallel, False),
        "compile.enabled": (config.compile.enabled, False),
        "memory.offload": (config.memory.offload, "none"),
    }
    for key, (value, off) in beside.items():
        if value != off:
            yield Problem(key, "cannot be combined with ep yet", f"set it to {off}", value)


def _tracking(config: RunConfig) -> Iterator[Problem]:
    address = config.record.mlflow.tracking_uri
    if address is not None and clean_address(address) != address:
        rule = "a password in it would be recorded with the run"
        remedy = "leave it out and set MLFLOW_TRACKING_URI in the environment"
        yield Problem("record.mlflow.tracking_uri", rule, remedy, clean_address(address))


def _replay(config: RunConfig) -> Iterator[Problem]:
    every = config.sentinel.replay_every_steps
    refused = {
        "a pipeline has several micro-batches of a step in flight": config.parallel.pp > 1,
        "live replicas can come and go between the two passes": config.fault_tolerance == "live",
        "ep spreads a wrong result to other ranks with the tokens": config.parallel.ep > 1,
    }
    for rule in (rule for rule, applies in refused.items() if every is not None and applies):
        yield Problem("sentinel.replay_every_steps", rule, "leave it out", every)


def _float8(config: RunConfig) -> Iterator[Problem]:
    refused = {
        "tensor parallelism splits the rows that are scaled": config.parallel.tp > 1,
        "8-bit gradients do not work with the fp16 loss scaler": config.precision.dtype == "fp16",
    }
    asked = config.precision.float8
    for rule in (rule for rule, applies in refused.items() if asked != "none" and applies):
        yield Problem("precision.float8", rule, "use none, or bf16 without tp", asked)


RULES: Sequence[Rule] = (
    Rule(("precision.float8", "precision.dtype", "parallel.tp"), _float8),
    Rule(("sentinel.replay_every_steps", "parallel.pp", "parallel.ep", "fault_tolerance"), _replay),
    Rule(("record.mlflow.tracking_uri",), _tracking),
    Rule(("max_steps", "num_train_epochs"), _length),
    Rule(("name",), _name),
    Rule(("checkpoint.keep_best", "checkpoint.every_steps"), _best),
    Rule(("checkpoint.contents", "parallel.pp"), _contents),
    Rule(
        (
            "parallel.sync_batch_norm",
            "parallel.tp",
            "parallel.pp",
            "parallel.cp",
            "reproducibility",
            "fault_tolerance",
        ),
        _batch_norm,
    ),
    Rule(("max_steps", "optimization.warmup_steps"), _warmup),
    Rule(
        (
            "model.pretrained",
            "model.pretrained_allow",
            "parallel.pp",
            "parallel.pipeline.balance",
        ),
        _pretrained,
    ),
    Rule(
        (
            "max_steps",
            "optimization.lr_scheduler_type",
            "optimization.warmup_steps",
            "optimization.warmup_ratio",
            "optimization.decay_steps",
            "optimization.learning_rate_scaling",
        ),
        _schedule,
    ),
    Rule(("optimization.learning_rate_scaling", "optimization.base_batch_size"), _scaling),
    Rule(("global_batch_size", "micro_batch_size", "reproducibility"), _micro_batch),
    Rule(("parallel.strategy", "parallel.dp_replicate", "parallel.dp_shard"), _axes),
    Rule((*_AXES, "precision.dtype", "fault_tolerance"), _divided),
    Rule((*_AXES, "parallel.pipeline.schedule", "parallel.tensor.loss_parallel"), _pipeline),
    Rule(
        (
            "parallel.ep",
            "parallel.dp_shard",
            "parallel.cp",
            "parallel.tensor.sequence_parallel",
            "compile.enabled",
            "memory.offload",
        ),
        _experts,
    ),
    Rule(("memory.offload", "parallel.strategy"), _offload),
    Rule(
        ("reproducibility", "parallel.strategy", "data.iterable_sharding", "compile.mode"),
        _bitwise,
    ),
    Rule(
        (
            "communication.compression",
            "communication.allow",
            "parallel.strategy",
            "reproducibility",
            "fault_tolerance",
            "precision.dtype",
        ),
        _compression,
    ),
)


def broken_rules(config: RunConfig, wrong_keys: frozenset[str] = frozenset()) -> list[Problem]:
    """Return every problem between keys; rules that read a key known to be wrong are skipped."""
    own = () if "parallel.strategy" in wrong_keys else config.parallel.traits.rules
    return [
        problem
        for rule in (*RULES, *own)
        if wrong_keys.isdisjoint(rule.reads)
        for problem in rule.check(config)
    ]
