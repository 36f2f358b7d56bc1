"""Parameter servers next to ddp and local SGD: loss against staleness, time on unequal ranks."""
