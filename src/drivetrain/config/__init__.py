"""The config: its keys, how it is loaded and validated, and where each value came from."""

from drivetrain.config.load import load_config, resolve
from drivetrain.config.provenance import ResolvedConfig, Source
from drivetrain.config.schema import RunConfig

__all__ = ["ResolvedConfig", "RunConfig", "Source", "load_config", "resolve"]
