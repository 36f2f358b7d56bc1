"""The patterns, and the scripts of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "examples" / "patterns"


@dataclass(frozen=True)
class Pattern:
    """A script before and after; `kill_at` is an optimizer step, a little after the middle."""

    name: str
    shows: str
    kill_at: int

    @property
    def before(self) -> Path:
        return SCRIPTS / self.name / "before.py"

    @property
    def after(self) -> Path:
        return SCRIPTS / self.name / "after.py"


PATTERNS = (
    Pattern("nanogpt", "nanoGPT's loop: own learning rate, endless stream, tied weights", 14),
    Pattern("no_trainer", "transformers' no-trainer loop: its scheduler, decay groups", 14),
    Pattern("image_recipe", "MixUp, label smoothing, batch norm, OneCycleLR, EMA, top-5", 14),
    Pattern("wgan_gp", "WGAN-GP: two models, two optimizers, gradient penalty", 42),
    Pattern("clip", "CLIP: a loss over the batch of all ranks", 14),
    Pattern("distillation", "a frozen teacher with dropout and batch norm", 14),
    Pattern("lora", "peft's LoRA on a frozen base, saved without it", 14),
    Pattern("lightning", "a LightningModule, ReduceLROnPlateau, EarlyStopping", 20),
    Pattern("stream", "a Hugging Face stream behind a shuffle buffer, two epochs", 20),
)
