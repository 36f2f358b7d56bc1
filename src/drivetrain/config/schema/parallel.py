"""The section `parallel`: the axes, and whatever strategies there are with their own sections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar

from pydantic import Field, create_model

from drivetrain.core.section import Section
from drivetrain.core.traits import STRATEGIES, Traits, all_traits, traits_of

S = TypeVar("S", bound=Section)
if TYPE_CHECKING:
    StrategyName = str
else:
    StrategyName = Literal[STRATEGIES.names]


class Tensor(Section):
    """How `tp` ranks share each layer."""

    plan: str | tuple[str, ...] = "model"
    """model: the model's own `tp_plan` (Hugging Face models have one). module:function: called with
    the model, returns such a plan. Or a list like [blocks.*.up=colwise, blocks.*.down=rowwise]."""
    sequence_parallel: bool = False
    """Between the layers, too, each rank keeps a part of the sequence only: norms and residuals in
    1/tp of the memory."""
    loss_parallel: bool = False
    """Leave the logits in parts and compute the cross-entropy over them: the last layer's output is
    never whole."""


class Pipeline(Section):
    """How `pp` ranks share the layers."""

    schedule: Literal[
        "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zero_bubble", "zbv", "dualpipev"
    ] = "1f1b"
    """In which order micro-batches go forward and backward. From looped_bfs and interleaved_1f1b on
    each rank has several stages."""
    split_points: tuple[str, ...] = ()
    """Names of the blocks that open a stage, the first left out; empty: balanced."""
    balance: Literal["parameters", "time"] = "parameters"
    """What stages are balanced by: number of weights, or each block's measured time."""
    stages_per_rank: int = Field(default=2, gt=0)
    """For the schedules that have several."""


class Parallel(Section):
    """How the model is spread."""

    strategy: StrategyName = Field(
        default=STRATEGIES.names[0],
        description=" ".join(f"{each.name}: {each.summary}." for each in all_traits()),
    )
    dp_replicate: int | Literal["auto"] = "auto"
    """Number of copies of the model. With dp_shard > 1: copies of shards (HSDP)."""
    dp_shard: int | Literal["auto"] = "auto"
    """Number of ranks that share one copy."""
    tp: int = Field(default=1, gt=0)
    """Tensor parallel: ranks that share each layer."""
    pp: int = Field(default=1, gt=0)
    """Pipeline parallel: ranks that each have some of the layers."""
    cp: int = Field(default=1, gt=0)
    """Context parallel: ranks that each have a part of every sequence."""
    tensor: Tensor = Tensor()
    """Details for tp."""
    pipeline: Pipeline = Pipeline()
    """Details for pp."""
    timeout_s: float = Field(default=600.0, gt=0)
    """How long a collective may wait for the other ranks."""

    @property
    def traits(self) -> Traits:
        """What is known of the strategy."""
        return traits_of(self.strategy)

    @property
    def options(self) -> Section:
        """The strategy's own section."""
        section: Section = getattr(self, self.strategy)
        return section

    def details(self, kind: type[S]) -> S:
        """A strategy's section, by its type."""
        sections = (getattr(self, name) for name in type(self).model_fields)
        return next(section for section in sections if isinstance(section, kind))


if not TYPE_CHECKING:
    # a section for each strategy that is registered, here or by another package
    Parallel = create_model(
        "Parallel",
        __base__=Parallel,
        __module__=__name__,
        __doc__=Parallel.__doc__,
        **{
            each.name: (
                each.section,
                Field(default=each.section(), description=f"Details for strategy {each.name}."),
            )
            for each in all_traits()
        },
    )
