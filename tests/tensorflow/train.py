"""What the tests train: `… OUTPUT [KILL_STEP [SERVERS]]`.

Worker 1 dies at that step, once. With parameter servers there are no common steps:
the last rank dies after the epoch of that number.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import tensorflow as tf

from drivetrain import TensorFlowDistributedTrainer

GLOBAL_BATCH, SAMPLES, EPOCHS = 16, 64, 6
STEPS_PER_EPOCH = SAMPLES // GLOBAL_BATCH
RANK = int(os.environ.get("RANK", "0"))
IS_FIRST = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def create_distributed_model(strategy: Any) -> Any:
    """A classifier with the same first weights each time."""
    del strategy
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(32, activation="relu", input_shape=(20,)),
            tf.keras.layers.Dense(4, activation="softmax"),
        ]
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def data() -> Any:
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(SAMPLES, 20)).astype("float32")
    labels = (inputs[:, :4]).argmax(axis=1)
    return tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(GLOBAL_BATCH)


def dies_at(step: int, died: Path) -> Any:
    """Worker 1, once: an attempt may also end before that step, on a busy machine."""

    class Dies(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            done = int(self.model.optimizer.iterations.numpy())
            if RANK == 1 and done == step and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    return Dies()


def asks_to_die(epoch: int, asked: Path) -> Any:
    """The coordinator has no way to kill a worker but to ask."""

    class Asks(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, number: int, logs: Any = None) -> None:
            if IS_FIRST and epoch and number == epoch:
                asked.touch()
                time.sleep(120)  # until the supervisor ends it; the other worker could finish alone

    return Asks()


def die_when_asked(asked: Path) -> None:
    while not asked.exists():
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    output, kill_at, servers = Path(sys.argv[1]), *(int(word) for word in sys.argv[2:4])
    trainer = TensorFlowDistributedTrainer(
        create_distributed_model, epochs=EPOCHS, parameter_servers=servers
    )
    asked = output.with_suffix(".kill")
    if servers and kill_at and IS_FIRST and int(os.environ["WORLD_SIZE"]) - 1 == RANK:
        Thread(target=die_when_asked, args=(asked,), daemon=True).start()
    if servers:
        callbacks, settings = [asks_to_die(kill_at, asked)], {"steps_per_epoch": STEPS_PER_EPOCH}
        history = trainer.fit(data().repeat(), callbacks=callbacks, **settings)
        loss = trainer.model.evaluate(data().repeat(), verbose=0, steps=STEPS_PER_EPOCH)[0]
    else:
        history = trainer.fit(data(), callbacks=[dies_at(kill_at, output.with_suffix(".died"))])
        loss = trainer.model.evaluate(data(), verbose=0)[0]
    found = {
        "losses": history.history["loss"],
        "epochs": history.epoch,
        "final_loss": loss,
        "strategy": type(trainer.strategy).__name__,
        "run_dir": str(trainer.run_dir),
        "host": socket.gethostname(),
    }
    if RANK == 0:
        output.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
