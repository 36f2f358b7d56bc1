"""What a user may say to Slurm beyond the job itself."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from drivetrain.launch.target import option


@dataclass(frozen=True)
class Options:
    """Each field is a flag of `drivetrain train --on slurm`, named as sbatch names it."""

    partition: str | None = option("partition, or several with commas")
    account: str | None = option("account to charge")
    qos: str | None = option("quality of service")
    constraint: str | None = option("features the nodes must have")
    reservation: str | None = option("reservation to run in")
    nodelist: str | None = option("nodes that must be among those given")
    exclude: str | None = option("nodes that must not be")
    cpus_per_node: int | None = option("CPU cores of each node; Slurm's default if left")
    mem: str | None = option("memory of each node, such as 64G")
    exclusive: bool = option("no other job on the nodes", False)
    container_image: str | None = option("image to run in, by the pyxis plugin")
    container_mounts: tuple[str, ...] = option("more folders to see in it: PATH or FROM:TO", ())
    python: str | None = option("the nodes' Python; default: this one, or the container's")
    setup: tuple[str, ...] = option("a line of shell to run first, such as 'module load cuda'", ())
    sbatch: tuple[str, ...] = option("any other #SBATCH line, such as --mail-type=END", ())

    @property
    def interpreter(self) -> str:
        """What runs drivetrain on the nodes."""
        return self.python or ("python" if self.container_image is not None else sys.executable)
