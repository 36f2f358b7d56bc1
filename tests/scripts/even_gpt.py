"""A small GPT on samples of one length, each word of the command line a setting."""

from __future__ import annotations

from benchmarks.plan.models import MODELS, make_optimizer
from drivetrain import Task, Trainer, load_config

if __name__ == "__main__":
    bench = MODELS["gpt"]
    config = load_config(defaults={"max_steps": 2, "global_batch_size": 16})
    task = Task(bench.model, bench.loss, lambda weights, _: make_optimizer("adamw", list(weights)))
    Trainer(task, config).fit(bench.dataset(64))
