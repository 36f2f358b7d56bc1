"""Rules between keys. Each is a pure function that answers with every problem it sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import Problem


@dataclass(frozen=True)
class Rule:
    """A check and the keys it reads: it is skipped while one of those is itself wrong."""

    reads: tuple[str, ...]
    check: Callable[[RunConfig], Iterator[Problem]]


def _length(config: RunConfig) -> Iterator[Problem]:
    if config.max_steps is None and config.num_train_epochs is None:
        yield Problem(
            "max_steps",
            "the run has no end",
            "set max_steps, or num_train_epochs",
            has_value=False,
        )


def _warmup(config: RunConfig) -> Iterator[Problem]:
    warmup = config.optimization.warmup_steps
    if config.max_steps is not None and warmup > config.max_steps:
        yield Problem(
            "optimization.warmup_steps",
            f"longer than the run, which is {config.max_steps} steps",
            f"use at most {config.max_steps}",
            warmup,
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
        yield Problem(
            "micro_batch_size",
            f"does not divide global_batch_size = {config.global_batch_size}",
            f"use one of {_divisors_near(config.global_batch_size, micro)}",
            micro,
        )


def _divisors_near(whole: int, wanted: int, most: int = 4) -> str:
    divisors = [d for d in range(1, whole + 1) if whole % d == 0]
    nearest = sorted(sorted(divisors, key=lambda d: abs(d - wanted))[:most])
    return ", ".join(map(str, nearest))


def _axes(config: RunConfig) -> Iterator[Problem]:
    parallel = config.parallel
    for name in ("dp_replicate", "dp_shard"):
        size = getattr(parallel, name)
        if size != "auto" and size < 1:
            yield Problem(
                f"parallel.{name}", "must be at least 1", "use a positive number, or auto", size
            )
    if parallel.strategy == "ddp" and parallel.dp_shard not in ("auto", 1):
        yield Problem(
            "parallel.dp_shard",
            "ddp keeps a full copy on every rank",
            "use parallel.strategy=fsdp, or leave it out",
            parallel.dp_shard,
        )


def _bitwise(config: RunConfig) -> Iterator[Problem]:
    if config.reproducibility != "bitwise":
        return
    if config.parallel.strategy != "ddp":
        yield Problem(
            "reproducibility",
            f"the same bits are only kept for parallel.strategy=ddp, not "
            f"{config.parallel.strategy}",
            "use ddp, or reproducibility=standard",
            "bitwise",
        )
    if config.data.iterable_sharding == "own_shard":
        yield Problem(
            "data.iterable_sharding",
            "shards per rank make the batches depend on the number of ranks",
            "use same_stream, or reproducibility=standard",
            "own_shard",
        )


RULES: Sequence[Rule] = (
    Rule(("max_steps", "num_train_epochs"), _length),
    Rule(("max_steps", "optimization.warmup_steps"), _warmup),
    Rule(("optimization.learning_rate_scaling", "optimization.base_batch_size"), _scaling),
    Rule(("global_batch_size", "micro_batch_size", "reproducibility"), _micro_batch),
    Rule(("parallel.strategy", "parallel.dp_replicate", "parallel.dp_shard"), _axes),
    Rule(("reproducibility", "parallel.strategy", "data.iterable_sharding"), _bitwise),
)


def broken_rules(config: RunConfig, wrong_keys: frozenset[str] = frozenset()) -> list[Problem]:
    """Every problem between keys, leaving out rules that read a key already known to be wrong."""
    return [
        problem
        for rule in RULES
        if wrong_keys.isdisjoint(rule.reads)
        for problem in rule.check(config)
    ]
