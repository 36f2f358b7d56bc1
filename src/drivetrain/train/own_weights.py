"""The model's weights for the script itself: whole, whatever the ranks hold of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from drivetrain.checkpoint.weight_files import MAX_SHARD_BYTES
from drivetrain.train.assemble import Assembly
from drivetrain.train.saving.pretrained import save_pretrained


class OwnWeights(ABC):
    """What `Trainer` and a loop of one's own have in common: ways out for the weights."""

    @abstractmethod
    def _assembled(self, what: str) -> Assembly:
        """What trains; RuntimeError, saying where `what` belongs, when nothing does yet."""

    def full_state_dict(self) -> dict[str, Any]:
        """The whole model's state dict, copied to rank 0's CPU; other ranks get an empty dict.

        Names are the model's own, whatever the strategy. Called on every rank.
        """
        assembly = self._assembled("full_state_dict")
        return assembly.engine.spread.full_state(keep=assembly.world.is_main)

    def save_pretrained(
        self,
        folder: str | Path,
        tokenizer: Any = None,
        processor: Any = None,
        max_shard_gb: float = MAX_SHARD_BYTES / 1e9,
        *,
        merge_adapter: bool = False,
    ) -> None:
        """Write a Hugging Face model for `from_pretrained`, whatever the strategy.

        Of a model with an adapter (peft) the adapter alone; with `merge_adapter` the model, with a
        LoRA adapter put into its weights. A tokenizer (the task's, if it has one)
        and a processor are written beside it. Called on every rank; rank 0 writes.
        """
        assembly = self._assembled("save_pretrained")
        given = [e for e in (tokenizer or assembly.tokenizer, processor) if e is not None]
        most = int(max_shard_gb * 1e9)
        save_pretrained(assembly, Path(folder), given, most, merge_adapter=merge_adapter)
