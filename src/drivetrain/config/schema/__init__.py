"""Every key a run understands. Frozen, and strict about names: a typo is an error, not a default.

Names are the ones people already have in their fingers: Hugging Face's for optimisation,
torchtitan's for the axes, torch's own for what is handed straight to it.
Each section of a config stands in the file of its name; a strategy's, in its own folder.
"""

from drivetrain.config.schema.checkpoint import Checkpoint
from drivetrain.config.schema.communication import Communication, PowerSGD, TopK
from drivetrain.config.schema.compile import Compile
from drivetrain.config.schema.data import Data
from drivetrain.config.schema.evaluation import Evaluation
from drivetrain.config.schema.memory import Memory
from drivetrain.config.schema.optimization import Optimization
from drivetrain.config.schema.parallel import Parallel, Pipeline, StrategyName, Tensor
from drivetrain.config.schema.precision import Precision, Scaler
from drivetrain.config.schema.record import SINKS, MLflow, Prometheus, Record, SinkName, Wandb
from drivetrain.config.schema.run import RunConfig
from drivetrain.config.schema.sentinel import Sentinel
from drivetrain.core.section import Section

__all__ = [
    "SINKS",
    "Checkpoint",
    "Communication",
    "Compile",
    "Data",
    "Evaluation",
    "MLflow",
    "Memory",
    "Optimization",
    "Parallel",
    "Pipeline",
    "PowerSGD",
    "Precision",
    "Prometheus",
    "Record",
    "RunConfig",
    "Scaler",
    "Section",
    "Sentinel",
    "SinkName",
    "StrategyName",
    "Tensor",
    "TopK",
    "Wandb",
]
