"""Choose the values that the user left open, with reasons; refuse conflicting settings."""

from __future__ import annotations

from drivetrain.config.provenance import ResolvedConfig
from drivetrain.config.rules import multiples_near
from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.data.batches import BatchPlan, solve_micro_batch
from drivetrain.data.sources import Source
from drivetrain.record.run_directory import micro_batch_so_far
from drivetrain.record.session import earlier_directory
from drivetrain.record.sinks import choose_sinks
from drivetrain.train.setup.optimizer import settle
from drivetrain.train.setup.without_effect import is_refused, values_so_far
from drivetrain.train.task import Task

IN_ORDER = "data: read in order, unshuffled: its DataLoader has no shuffle=True"


def fill_in(
    resolved: ResolvedConfig, num_ranks: int, source: Source, *, is_main: bool
) -> ResolvedConfig:
    """Fill in the values that the user left open, each with its reason."""
    if resolved.config.evaluation.batch_size is None:
        micro = resolved.config.micro_batch_size
        size = min(32, resolved.config.global_batch_size) if micro == "auto" else micro
        why = "the same at any number of ranks" if micro == "auto" else "micro_batch_size"
        resolved = resolved.choose("evaluation.batch_size", size, why)
    if resolved.config.model.initialization == "auto":
        reads = resolved.config.model.pretrained is not None
        how = "keyed" if reads else "sequential"
        why = "only what the files lack is drawn" if reads else "as plain torch with this seed"
        resolved = resolved.choose("model.initialization", how, why)
    if resolved.config.record.sinks == "auto":
        resolved = resolved.choose("record.sinks", *choose_sinks(is_main=is_main))
    return _choose_micro_batch(resolved, num_ranks, source)


def _choose_micro_batch(resolved: ResolvedConfig, num_ranks: int, source: Source) -> ResolvedConfig:
    """Choose the size used before in this run, the batch sampler's, or one that fits the ranks."""
    if resolved.config.micro_batch_size == "auto":
        earlier = micro_batch_so_far(earlier_directory())
        if earlier is not None and resolved.config.global_batch_size % earlier == 0:
            return resolved.choose("micro_batch_size", earlier, "as in this run's first attempt")
        if source.sampler is not None and source.sampler.yields_batches:
            largest = source.sampler.largest(source.sampler.draw(resolved.config.seed, 0))
            if resolved.config.global_batch_size % largest:
                rule = f"is not a multiple of the batch sampler's largest batch, {largest}"
                value = resolved.config.global_batch_size
                remedy = f"use {multiples_near(value, largest)}"
                raise ConfigError([Problem("global_batch_size", rule, remedy, value)])
            return resolved.choose("micro_batch_size", largest, "the batch sampler's batches")
    return solve_micro_batch(resolved, num_ranks)


def choose_what_is_brought(
    task: Task, resolved: ResolvedConfig, source: Source
) -> tuple[ResolvedConfig, list[str]]:
    """Record what the script brings in place of the config's keys; return lines about it."""
    resolved, notes = choose_order(resolved, source)
    resolved, warnings = choose_schedule(task, resolved)
    notes += note_on_batches(resolved.config, source)
    return resolved, notes + note_on_generator(resolved.config, source) + warnings


def note_on_batches(config: RunConfig, source: Source) -> list[str]:
    """Return a line if a DataLoader's own batches would be others than the config's."""
    size, whole, micro = source.loader_batch_size, config.global_batch_size, config.micro_batch_size
    length = source.epoch_length(int(micro))
    if length is None or size is None:
        return []
    unused, instead = [], f"a step has {whole} samples, in micro-batches of {micro}"
    if size not in (1, micro, whole):  # DataLoader(data) has 1
        unused.append(f"batch_size={size}")
    if source.loader_drops_last and (length % size or length % whole):
        unused.append("drop_last=True")
        instead += f"; an epoch's last step has {length % whole}" if length % whole else ""
    if not unused:
        return []
    is_or_are = "is" if len(unused) == 1 else "are"
    return [f"data: its DataLoader's {' and '.join(unused)} {is_or_are} not used: {instead}"]


def note_on_generator(config: RunConfig, source: Source) -> list[str]:
    """Return a line if a DataLoader's own random numbers do not decide the order."""
    if not source.loader_has_generator:
        return []
    return [
        f"data: the DataLoader's generator is not used: the order comes from seed={config.seed}"
    ]


def choose_order(resolved: ResolvedConfig, source: Source) -> tuple[ResolvedConfig, list[str]]:
    """Record `data.shuffle` as the data decides it, if it does, and return lines about it.

    ConfigError if the opposite is set on the command line or in a file. It is a warning where the
    script sets it or a file repeats the default, and in a run that began with it.
    """
    key, why = "data.shuffle", source.why_in_this_order
    said, where = resolved.config.data.shuffle, resolved.source(key)
    if not why or (where.is_users and said == source.shuffle):
        return resolved, []
    is_loaders = source.length is not None and source.sampler is None
    if not where.is_users:
        in_order = is_loaders and not source.shuffle
        notes = [IN_ORDER] if in_order else []
        return resolved.choose(key, source.shuffle, why), notes
    before = values_so_far()
    shown, remedy = str(said).lower(), "leave it out"
    if is_loaders:
        remedy += f", or write DataLoader(…, shuffle={said})"
    if is_refused(key, said, where, before):
        raise ConfigError([Problem(key, f"set {where.where}, but {why}", remedy, shown)])
    warning = f"warning: {key} = {shown} (set {where.where}) has no effect: {why}; {remedy}"
    if before.get(key) == said:
        return resolved.unused(key, why), [warning]  # as recorded, for the next resume
    return resolved.choose(key, source.shuffle, why), [warning]


def choose_schedule(task: Task, resolved: ResolvedConfig) -> tuple[ResolvedConfig, list[str]]:
    """Use the task's own schedule, if any, and return warnings.

    ConfigError if the config sets one too.
    """
    if task.schedule is None:
        return resolved, []
    key = "optimization.lr_scheduler_type"
    said = resolved.config.optimization
    beside = {
        key: said.lr_scheduler_type != "none",
        "optimization.warmup_steps": bool(said.warmup_steps),
        "optimization.warmup_ratio": bool(said.warmup_ratio),
        "optimization.min_lr_ratio": bool(said.min_lr_ratio),
        "optimization.learning_rate_scaling": said.learning_rate_scaling != "none",
    }
    why = "the script has its own schedule, and only one can set the learning rate"
    without_effect = {name: why for name, is_set in beside.items() if is_set}
    resolved, warnings = settle(resolved, without_effect, "remove one of them")
    return resolved.choose(key, "none", "the script has its own schedule"), warnings


def check_schedule(config: RunConfig, total_steps: int | None) -> None:
    shape = config.optimization.lr_scheduler_type
    if total_steps is None and config.optimization.needs_the_end:
        raise ConfigError(
            [
                Problem(
                    "optimization.lr_scheduler_type",
                    "depends on the end of the run, and a stream's end is not known in advance",
                    "set max_steps; or use constant, or decay_steps and warmup_steps",
                    shape,
                )
            ]
        )


def total_steps_of(config: RunConfig, plan: BatchPlan) -> int | None:
    if config.max_steps is not None:
        return config.max_steps
    if plan.length is None or config.num_train_epochs is None:
        return None
    return plan.end_of(config.num_train_epochs - 1)
