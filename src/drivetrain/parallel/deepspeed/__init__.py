"""DeepSpeed's ZeRO behind the one Strategy interface."""
