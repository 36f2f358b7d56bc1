"""torchmetrics objects that a validation_step logs: exact over all samples of all ranks.

The inputs of a metric are kept per sample, and the metric is computed from all of them on rank 0,
in the data's order. So its value is the same at any number of ranks, whatever the metric computes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.train.outputs import PerSample


def is_metric(value: Any) -> bool:
    """True for a Metric or MetricCollection. Checks methods: torchmetrics may not be installed."""
    return isinstance(value, nn.Module) and hasattr(value, "compute") and hasattr(value, "update")


class MetricCalls:
    """The arguments that the metrics of a module were called with in one step."""

    def __init__(self) -> None:
        self._calls: dict[int, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}
        self._is_inside = False

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Record the outermost call of each metric: a collection calls its members too."""
        self._calls = {}
        with ExitStack() as stack:
            for metric in [each for each in module.modules() if is_metric(each)]:
                stack.enter_context(self._watched(metric))
            yield

    @contextmanager
    def _watched(self, metric: Any) -> Iterator[None]:
        before = {name: metric.__dict__.get(name) for name in ("forward", "update")}
        for name in before:
            metric.__dict__[name] = self._noting(metric, getattr(metric, name))
        try:
            yield
        finally:
            for name, own in before.items():
                if own is None:
                    del metric.__dict__[name]
                else:
                    metric.__dict__[name] = own

    def _noting(self, metric: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return call(*args, **kwargs)
            self._calls.setdefault(id(metric), []).append((args, kwargs))
            self._is_inside = True
            try:
                return call(*args, **kwargs)
            finally:
                self._is_inside = False

        return noted

    def of(self, metric: Any, name: str) -> dict[str | int, Any]:
        """Return the arguments of a logged metric in this step, by position or name."""
        calls = self._calls.get(id(metric), [])
        if len(calls) != 1:
            rule = f"logs a metric that was called {len(calls)} times in this step"
            remedy = "call it once in each validation_step, and log that object (or its collection)"
            raise ConfigError([Problem(f"self.log({name!r})", rule, remedy, has_value=False)])
        args, kwargs = calls[0]
        given: dict[str | int, Any] = dict(enumerate(args))
        given.update(kwargs)
        return given


class LoggedMetrics:
    """The metrics that validation_step logged, and their values over a whole set."""

    def __init__(self) -> None:
        self._metrics: dict[str, tuple[Any, dict[str | int, str]]] = {}

    def keep(self, name: str, metric: Any, given: Mapping[str | int, Any]) -> dict[str, PerSample]:
        """Keep a step's samples for `__call__`, which gets those of all steps."""
        labels = {key: f"{name}({key})" for key in given}
        self._metrics[name] = (metric, labels)
        return {label: PerSample(given[key]) for key, label in labels.items()}

    def __call__(self, outputs: Mapping[str, Any] | None) -> dict[str, Any]:
        """Compute the values; this is `Task.summarize` of a Lightning task."""
        found: dict[str, Any] = {}
        for name, (metric, labels) in self._metrics.items() if outputs else ():
            value = _computed(metric, {key: (outputs or {})[at] for key, at in labels.items()})
            found |= value if isinstance(value, Mapping) else {name: value}
        return found


def _computed(metric: Any, given: Mapping[str | int, Any]) -> Any:
    fresh = copy.deepcopy(metric)  # the step's metric has already seen this rank's samples
    for each in fresh.values() if hasattr(fresh, "values") else (fresh,):
        each.distributed_available_fn = lambda: False  # the other ranks compute nothing
    fresh.reset()
    by_place = [value for key, value in given.items() if isinstance(key, int)]
    by_name = {key: value for key, value in given.items() if isinstance(key, str)}
    fresh.to("cpu").update(*by_place, **by_name)
    return fresh.compute()
