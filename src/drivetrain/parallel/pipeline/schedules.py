"""Schedules by config name: their requirements, and the fraction of a step they idle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drivetrain.config.schema import Pipeline
from drivetrain.core.errors import Problem


@dataclass(frozen=True)
class PipelineSchedule:
    """One of torch's schedules."""

    torch_name: str
    is_single: bool = False
    """One stage per rank."""
    is_v: bool = False
    """Two stages per rank, the second in reverse order: the loss is on the first rank."""
    falls_back_to: str = ""
    """A schedule for any number of micro-batches, with the same stages on the same ranks."""

    def make(self, stages: list[Any], num_micro_batches: int) -> Any:
        """Create torch's schedule. Losses are already weighted, so gradients are not scaled."""
        from torch.distributed.pipelining import schedules  # slow: more than half a second

        kind = getattr(schedules, self.torch_name)
        stage = stages[0] if self.is_single else stages
        return kind(stage, num_micro_batches, loss_fn=_is_the_loss, scale_grads=False)


def _is_the_loss(output: Any, target: Any) -> Any:  # noqa: ARG001
    return output


SCHEDULES = {
    "gpipe": PipelineSchedule("ScheduleGPipe", is_single=True),
    "1f1b": PipelineSchedule("Schedule1F1B", is_single=True, falls_back_to="gpipe"),
    "looped_bfs": PipelineSchedule("ScheduleLoopedBFS"),
    "interleaved_1f1b": PipelineSchedule("ScheduleInterleaved1F1B", falls_back_to="looped_bfs"),
    "zero_bubble": PipelineSchedule("ScheduleInterleavedZeroBubble", falls_back_to="looped_bfs"),
    "zbv": PipelineSchedule("ScheduleZBVZeroBubble", is_v=True),
    "dualpipev": PipelineSchedule("ScheduleDualPipeV", is_v=True),
}


def num_stages(config: Pipeline, num_ranks: int) -> int:
    """Return the number of stages over all ranks."""
    schedule = SCHEDULES[config.schedule]
    per_rank = 1 if schedule.is_single else 2 if schedule.is_v else config.stages_per_rank
    return num_ranks * per_rank


def fits(name: str, num_micro_batches: int, num_ranks: int, stages: int) -> bool:
    """True if torch's schedule supports this number of micro-batches."""
    if name == "1f1b":
        return num_micro_batches >= stages
    if name in ("interleaved_1f1b", "zero_bubble"):
        return num_micro_batches % num_ranks == 0
    if name == "dualpipev":
        return num_micro_batches >= stages
    return True


def schedule_problems(config: Pipeline, num_ranks: int, num_micro_batches: int) -> list[Problem]:
    """Return a problem if the schedule does not support this number of micro-batches."""
    name, stages = config.schedule, num_stages(config, num_ranks)
    if fits(name, num_micro_batches, num_ranks, stages):
        return []
    wanted = (
        f"a multiple of {num_ranks}"
        if name in ("interleaved_1f1b", "zero_bubble")
        else f"at least {stages}"
    )
    return [
        Problem(
            "parallel.pipeline.schedule",
            f"needs {wanted} micro-batches per rank and step, but there are {num_micro_batches}",
            "reduce micro_batch_size, or use gpipe",
            name,
        )
    ]


def bubble(config: Pipeline, num_ranks: int, num_micro_batches: int) -> float:
    """Return the idle fraction of a step, if all stages take equally long."""
    waits, work = num_ranks - 1, num_micro_batches
    if config.schedule in ("interleaved_1f1b", "looped_bfs"):
        work *= config.stages_per_rank
    elif config.schedule == "zero_bubble":
        work *= 3 * config.stages_per_rank  # of forward, input and weight, one is waited for
    elif config.schedule in ("zbv", "dualpipev"):
        return 0.0
    return waits / (work + waits)
