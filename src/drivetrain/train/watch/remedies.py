"""What to do about a loss that is not finite: depends on where it arose and on the config."""

from __future__ import annotations

from drivetrain.config.remedies import against_divergence
from drivetrain.train.assemble import Assembly

_SUSPECTS = "a division, a log or a sqrt"
_OTHER_PRECISION = {"bf16": "try precision.dtype=fp32", "fp16": "use precision.dtype=bf16"}


def change_settings(assembly: Assembly) -> str:
    """Return the settings that can keep a loss finite, without those that are set already."""
    config = assembly.config
    is_clipped = config.optimization.max_grad_norm is not None
    changes = against_divergence(
        is_clipped=is_clipped, has_own_optimizer=assembly.has_own_optimizer
    )
    precision = _OTHER_PRECISION.get(config.precision.dtype)
    return " or ".join([*changes, precision] if precision else changes)


def for_operation(where: str, settings: str) -> str:
    """Return the remedy for a value that arose in a module or in the loss function."""
    return f"look for {_SUSPECTS} in {where}; if there is none, {settings}"


def for_input(*, has_ids: bool) -> str:
    """Return the remedy for a batch that is not finite."""
    return f"look at {'those samples' if has_ids else 'the data'}: the data itself is not finite"


def for_parameter(step: int, settings: str) -> str:
    """Return the remedy for a parameter that was not finite before `step`, counted from 1."""
    if step == 1:
        return "look at how the model is initialized, and at the weights it loads"
    return f"resume from a checkpoint before step {step}, and {settings}"


def for_any_cause(settings: str) -> str:
    """Return the remedy where only the loss was seen."""
    return (
        f"look for values in the data that are not finite, and for {_SUSPECTS} in the model and "
        f"the loss function; if there are none, {settings}"
    )
