"""The section `compile`."""

from __future__ import annotations

from drivetrain.core.section import Section


class Compile(Section):
    """torch.compile, off unless asked for."""

    enabled: bool = False
    """Compile the model."""
    backend: str = "inductor"
    """Compiler backend."""
    mode: str | None = None
    """torch.compile's mode, for example max-autotune."""
