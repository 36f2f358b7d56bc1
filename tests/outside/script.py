"""Trains something small as the command line says, and leaves its losses behind."""

import json
import os
import sys
from pathlib import Path

from drivetrain import Trainer, load_config
from tests.ranks.small_task import samples, small_task

SETTINGS = {"global_batch_size": 8, "micro_batch_size": 2, "max_steps": 6}

if __name__ == "__main__":
    where, *argv = sys.argv[1:]
    config = load_config(argv=argv, defaults={**SETTINGS, "record.logging_steps": 1})
    trainer = Trainer(small_task(), config)
    history = trainer.fit(samples())
    losses = [step.loss for step in history.steps]
    Path(f"{where}.{os.environ['RANK']}").write_text(json.dumps(losses))
