"""What a user may say, and how it is checked and explained."""

from drivetrain.config.load import load_config, resolve
from drivetrain.config.provenance import ResolvedConfig, Source
from drivetrain.config.schema import RunConfig

__all__ = ["ResolvedConfig", "RunConfig", "Source", "load_config", "resolve"]
