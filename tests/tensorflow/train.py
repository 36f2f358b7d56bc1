"""What the tests train: `… OUTPUT [KILL_STEP]`; at that step of the first attempt worker 1 dies."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from drivetrain import TensorFlowDistributedTrainer

GLOBAL_BATCH, SAMPLES, EPOCHS = 16, 64, 6


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


def main() -> None:
    output, kill_step = Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 0
    trainer = TensorFlowDistributedTrainer(create_distributed_model, epochs=EPOCHS)
    rank, is_first = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

    class Dies(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            step = int(self.model.optimizer.iterations.numpy())
            if (rank, is_first) == ("1", "0") and step == kill_step:
                os.kill(os.getpid(), signal.SIGKILL)

    history = trainer.fit(data(), callbacks=[Dies()])
    loss = trainer.model.evaluate(data(), verbose=0)[0]
    found = {
        "losses": history.history["loss"],
        "epochs": history.epoch,
        "final_loss": loss,
        "strategy": type(trainer.strategy).__name__,
        "run_dir": str(trainer.run_dir),
    }
    if rank == "0":
        output.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
