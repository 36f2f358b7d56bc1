"""horovod: a full copy of the model per rank; gradients are summed by Horovod."""

from __future__ import annotations

from typing import Literal

from drivetrain.core.section import Section
from drivetrain.core.traits import Launcher, NamedLayout, Traits


class Horovod(Section):
    """Handed to Horovod."""

    compression: Literal["none", "fp16"] = "none"
    """fp16: send gradients rounded, in half the bytes; results then differ slightly."""


TRAITS = Traits(
    name="horovod",
    summary="like ddp, with gradients summed by Horovod",
    section=Horovod,
    strategy="drivetrain.strategies.horovod.strategy:make",
    cost="drivetrain.strategies.horovod.cost:COST",
    packages=("horovod",),
    launcher=Launcher(
        environment="horovod",
        rendezvous="drivetrain.strategies.horovod.rendezvous:join_over_horovod",
    ),
    backends=("horovod",),
    layouts={"horovod": NamedLayout(("dp_replicate",), {"parallel.strategy": "horovod"})},
)
