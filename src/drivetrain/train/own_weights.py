"""Access to the whole model's weights, however they are distributed over the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from drivetrain.checkpoint.weight_files import MAX_SHARD_BYTES
from drivetrain.train.assemble import Assembly
from drivetrain.train.saving.pretrained import save_pretrained


class OwnWeights(ABC):
    """Methods to export the weights that `Trainer` and `KeptLoop` share."""

    @abstractmethod
    def _assembled(self, what: str) -> Assembly:
        """Return the assembly; RuntimeError about `what` if it does not exist yet."""

    def full_state_dict(self) -> dict[str, Any]:
        """Return the whole model's state dict on rank 0's CPU; other ranks get an empty dict.

        Names are the model's own with any strategy. Call on every rank.
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
        """Write a Hugging Face model for `from_pretrained`, with any strategy.

        Call on every rank; rank 0 writes.

        Args:
            folder: Where to write.
            tokenizer: Written next to the model. Default: the task's, if it has one.
            processor: Written next to the model.
            max_shard_gb: Largest size of a file of weights, in GB.
            merge_adapter: Of a model with a LoRA adapter (peft), write the model with the adapter
                merged into its weights. Otherwise only the adapter is written.
        """
        assembly = self._assembled("save_pretrained")
        given = [e for e in (tokenizer or assembly.tokenizer, processor) if e is not None]
        most = int(max_shard_gb * 1e9)
        save_pretrained(assembly, Path(folder), given, most, merge_adapter=merge_adapter)
