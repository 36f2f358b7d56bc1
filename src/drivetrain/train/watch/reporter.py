"""Reporter: shows, records and remembers the results of steps and evaluations."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drivetrain.parallel.expert.load import ExpertLoad
from drivetrain.record.expert_load import EVENT, busiest, recorded
from drivetrain.record.progress import Snapshot, make_progress
from drivetrain.record.recorder import Recorder
from drivetrain.train.assemble import Assembly
from drivetrain.train.history import EvaluationResult, History, StepMetrics
from drivetrain.train.watch.utilization import tokens_per_s_at_peak, unknown_peak


class Reporter:
    """Prints on rank 0, keeps the history on every rank."""

    def __init__(self, assembly: Assembly, recorder: Recorder, history: History) -> None:
        self._assembly = assembly
        self._recorder = recorder
        self._history = history
        self._progress = make_progress(
            assembly.config.record.progress, assembly.total_steps, is_main=assembly.world.is_main
        )
        self._tokens_per_s_at_peak = tokens_per_s_at_peak(assembly)
        self._unsaid = unknown_peak(assembly)
        self._said: set[str] = set()
        self._began_s = self._last_s = time.perf_counter()

    def begin(self, run_dir: Path | None) -> None:
        """Print the run's directory and the notes on it."""
        if run_dir is not None:
            inside = run_dir.is_relative_to(Path.cwd())
            self._progress.say(f"run: {run_dir.relative_to(Path.cwd()) if inside else run_dir}")
        for note in self._assembly.notes:
            self._progress.say(note)
        self._began_s = self._last_s = time.perf_counter()

    def steps(self, metrics: list[StepMetrics]) -> None:
        """Take the steps since the last report: keep all, show and record the last."""
        self._history.steps.extend(metrics)
        self._history.skipped_steps += sum(m.is_skipped for m in metrics)
        now_s = time.perf_counter()
        window_s, self._last_s = max(now_s - self._last_s, 1e-9), now_s
        samples_per_s = sum(m.num_samples for m in metrics) / window_s
        tokens = [m.num_tokens for m in metrics if m.num_tokens is not None]
        tokens_per_s = sum(tokens) / window_s if tokens else None
        last = metrics[-1]
        norms = [m.grad_norm for m in metrics if m.grad_norm is not None]
        total = self._assembly.total_steps
        elapsed_s = now_s - self._began_s
        done = max(1, last.step - self._history.resumed_step)
        measured = self._assembly.engine.spread.measured()
        snapshot = Snapshot(
            step=last.step,
            total_steps=total,
            loss=last.loss,
            learning_rate=last.learning_rate,
            grad_norm=norms[-1] if norms else None,
            samples_per_s=samples_per_s,
            tokens_per_s=tokens_per_s,
            parts={**last.parts, **measured},
            eta_s=None if total is None else elapsed_s / done * (total - last.step),
        )
        self._progress.show(snapshot)
        rates = {"throughput/samples_per_sec": samples_per_s}
        if tokens_per_s is not None:
            rates["throughput/tokens_per_sec"] = tokens_per_s
            if self._tokens_per_s_at_peak is not None:
                rates["throughput/device/mfu"] = tokens_per_s / self._tokens_per_s_at_peak
            elif self._unsaid:
                self._progress.say(self._unsaid)
                self._unsaid = ""
        values = {**_scalars(last), **measured, **rates, **self._recorder.take_mean_times()}
        if self._assembly.engine.scaler is not None:
            values["train/skipped_steps"] = float(self._history.skipped_steps)
        load = self._assembly.engine.expert_load
        if load is not None:
            values |= self._expert_load(last.step, load)
        if self._assembly.world.is_main:
            self._recorder.scalars(last.step, values)
        else:  # the numbers are the same on every rank: record them once
            self._recorder.show(values, last.step)

    def _expert_load(self, step: int, load: ExpertLoad) -> dict[str, float]:
        """Record each expert's tokens as an event on rank 0; return two summary scalars."""
        layers = load.take()
        if not any(sum(layer.tokens) for layer in layers):
            return {}
        if self._assembly.world.is_main:
            tokens = recorded({layer.layer: layer.tokens for layer in layers})
            self._recorder.instant(EVENT, step=step, chosen=load.num_chosen, tokens=tokens)
        return {
            "experts/busiest": max(busiest(layer.tokens) for layer in layers),
            "experts/idle": sum(layer.tokens.count(0) for layer in layers)
            / sum(len(layer.tokens) for layer in layers),
        }

    def evaluation(self, name: str, result: EvaluationResult, length: int | None) -> None:
        """Report an evaluation on a set of validation data; `name` is empty for a single set."""
        lead = f"val/{name}/" if name else "val/"
        values = {f"{lead}{metric}": value for metric, value in result.metrics.items()}
        if self._assembly.world.is_main:
            self._recorder.scalars(result.step, values)
        figures = "  ".join(f"{metric} {value:.4f}" for metric, value in result.metrics.items())
        of = length if length is not None else result.num_samples
        self._progress.say(
            f"step {result.step}  evaluated {result.num_samples:,} of {of:,}"
            f"{f' of {name}' if name else ''}  {figures}"
        )

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context of work that is not part of the steps' time: an evaluation.

        The steps before it may not be reported yet, so their interval continues without this time.
        """
        clock = self._assembly.engine.timer.clock
        clock.wait_for(clock.now())  # the device may still be computing those steps
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self._last_s += time.perf_counter() - began_s

    def say(self, message: str) -> None:
        """Print a permanent line on rank 0."""
        self._progress.say(message)

    def say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            self._progress.say(message)

    def close(self) -> None:
        """Restore the terminal."""
        self._progress.close()


def _scalars(metrics: StepMetrics) -> dict[str, float]:
    values = {"train/loss": metrics.loss, "train/learning_rate": metrics.learning_rate}
    if metrics.grad_norm is not None:
        values["train/grad_norm"] = metrics.grad_norm
    return values | {f"train/{name}": value for name, value in metrics.parts.items()}
