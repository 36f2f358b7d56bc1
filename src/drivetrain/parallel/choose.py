"""From the config's word for a strategy to the strategy."""

from __future__ import annotations

from drivetrain.config.schema import RunConfig
from drivetrain.parallel.ddp import DDPStrategy
from drivetrain.parallel.dtypes import COMPUTE_DTYPES
from drivetrain.parallel.exact.bitwise import BitwiseStrategy
from drivetrain.parallel.local_sgd import LocalSGDStrategy
from drivetrain.parallel.strategy import Strategy


def strategy_from(config: RunConfig, micro_batch_blocks: list[range]) -> Strategy:
    """The strategy a config asks for; `micro_batch_blocks` are each rank's micro-batch indices."""
    if config.parallel.strategy == "fsdp":
        from drivetrain.parallel.fsdp import FSDPStrategy  # half a second that ddp need not wait

        return FSDPStrategy(
            config.parallel.fsdp,
            COMPUTE_DTYPES[config.precision.dtype],
            offload=config.memory.offload == "cpu",
        )
    if config.parallel.strategy == "deepspeed":
        from drivetrain.parallel.deepspeed.strategy import DeepSpeedStrategy

        return DeepSpeedStrategy(config, accumulation=max(map(len, micro_batch_blocks)))
    if config.parallel.strategy == "horovod":
        from drivetrain.parallel.horovod.strategy import HorovodStrategy

        return HorovodStrategy(config.parallel.horovod)
    if config.reproducibility == "bitwise":
        return BitwiseStrategy(config.parallel.ddp, micro_batch_blocks)
    if config.parallel.strategy == "local_sgd":
        return LocalSGDStrategy(config.parallel.local_sgd)
    return DDPStrategy(config.parallel.ddp, config.communication)
