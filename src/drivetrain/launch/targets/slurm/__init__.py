"""Slurm: an sbatch script one could have written by hand, and Slurm's own tools around it."""

from drivetrain.launch.targets.slurm.target import Slurm

__all__ = ["Slurm"]
