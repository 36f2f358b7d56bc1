"""The launch environments that Drivetrain supports; each detects itself and reads its variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from drivetrain.core.errors import EnvironmentProblem, Problem

# Identity: the rank of one process in its world.


@dataclass(frozen=True)
class Identity:
    """A process's ranks. `node_rank` counts nodes; `main_address` is the rendezvous address."""

    environment: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    main_address: str
    main_port: int

    @property
    def is_main(self) -> bool:
        """True for rank 0, which prints and writes for the run."""
        return self.rank == 0


class ClusterEnvironment(Protocol):
    """One way to start processes and tell them their ranks."""

    name: ClassVar[str]

    @staticmethod
    def detect(variables: Mapping[str, str]) -> bool:
        """True if these variables belong to this environment."""
        ...

    @staticmethod
    def identity(variables: Mapping[str, str]) -> Identity:
        """Return this process's identity."""
        ...


def whole_number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a variable as a number; EnvironmentProblem names it if it is missing or invalid."""
    text = variables.get(name)
    if text is None:
        if default is not None:
            return default
        raise EnvironmentProblem(
            [Problem(name, "not set", "start the script with its launcher", has_value=False)]
        )
    try:
        return int(text)
    except ValueError:
        raise EnvironmentProblem(
            [Problem(name, "must be a whole number", "check what sets this variable", text)]
        ) from None


class Torchrun:
    """torchrun and everything built on torchelastic, `drivetrain train` included."""

    name: ClassVar[str] = "torchrun"

    @staticmethod
    def detect(variables: Mapping[str, str]) -> bool:
        """Torchelastic sets its run id; users of plain env:// set RANK and LOCAL_RANK by hand."""
        return "TORCHELASTIC_RUN_ID" in variables or {
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "MASTER_ADDR",
        } <= set(variables)

    @staticmethod
    def identity(variables: Mapping[str, str]) -> Identity:
        """Read the six variables that the agent sets."""
        return _from_env_contract(Torchrun.name, variables)


class DeepSpeedLauncher:
    """A process of the `deepspeed` command: torch's variables, some under DeepSpeed's names."""

    name: ClassVar[str] = "deepspeed"

    @staticmethod
    def detect(variables: Mapping[str, str]) -> bool:
        """`CROSS` counts nodes, as with Horovod; a torchrun inside takes precedence."""
        own = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK"}
        return own <= set(variables) and "TORCHELASTIC_RUN_ID" not in variables

    @staticmethod
    def identity(variables: Mapping[str, str]) -> Identity:
        """Read the same variables as torchrun's, two of them under DeepSpeed's names."""
        theirs = {
            "LOCAL_WORLD_SIZE": variables["LOCAL_SIZE"],
            "GROUP_RANK": variables["CROSS_RANK"],
        }
        return _from_env_contract(DeepSpeedLauncher.name, {**variables, **theirs})


class RayTrain:
    """A Ray Train worker: torch's variables, set by Ray's own process-group setup."""

    name: ClassVar[str] = "ray"

    @staticmethod
    def detect(variables: Mapping[str, str]) -> bool:
        """Every Ray worker has the raylet's variable, only Ray Train's workers have a rank.

        A torchrun inside takes precedence.
        """
        return (
            "RAY_RAYLET_PID" in variables
            and {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(variables)
            and "TORCHELASTIC_RUN_ID" not in variables
        )

    @staticmethod
    def identity(variables: Mapping[str, str]) -> Identity:
        """Read the same variables as torchrun's; Ray calls the node's index NODE_RANK."""
        return _from_env_contract(RayTrain.name, variables)


def _from_env_contract(name: str, variables: Mapping[str, str]) -> Identity:
    rank = whole_number(variables, "RANK")
    local_world_size = whole_number(variables, "LOCAL_WORLD_SIZE", 1)
    return Identity(
        environment=name,
        rank=rank,
        local_rank=whole_number(variables, "LOCAL_RANK", 0),
        world_size=whole_number(variables, "WORLD_SIZE"),
        local_world_size=local_world_size,
        node_rank=whole_number(
            variables,
            "GROUP_RANK",
            whole_number(variables, "NODE_RANK", rank // max(local_world_size, 1)),
        ),
        main_address=variables.get("MASTER_ADDR", "127.0.0.1"),
        main_port=whole_number(variables, "MASTER_PORT", 0),
    )


class HorovodEnvironment:
    """A process of `horovodrun --gloo`: its rank is set; torch's rendezvous uses Horovod."""

    name: ClassVar[str] = "horovod"

    @staticmethod
    def detect(variables: Mapping[str, str]) -> bool:
        """Horovod sets the rank and size of each process."""
        return {"HOROVOD_RANK", "HOROVOD_SIZE"} <= set(variables)

    @staticmethod
    def identity(variables: Mapping[str, str]) -> Identity:
        """`cross` counts nodes. There is no port for torch yet: rank 0 opens one later."""
        return Identity(
            environment=HorovodEnvironment.name,
            rank=whole_number(variables, "HOROVOD_RANK"),
            local_rank=whole_number(variables, "HOROVOD_LOCAL_RANK", 0),
            world_size=whole_number(variables, "HOROVOD_SIZE"),
            local_world_size=whole_number(variables, "HOROVOD_LOCAL_SIZE", 1),
            node_rank=whole_number(variables, "HOROVOD_CROSS_RANK", 0),
            main_address=variables.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1"),
            main_port=0,
        )


class SlurmEnvironment:
    """A task started by srun: Slurm sets its rank, and the first node is the rendezvous host."""

    name: ClassVar[str] = "slurm"
    # Steps with ids this high are Slurm's own (batch script, interactive shell), not srun's tasks.
    _FIRST_RESERVED_STEP: ClassVar[int] = 0xFFFFFFF0

    @staticmethod
    def detect(variables: Mapping[str, str]) -> bool:
        """True only inside an srun step: a batch script alone is a single process."""
        if not {"SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_ID"} <= set(variables):
            return False
        return whole_number(variables, "SLURM_STEP_ID") < SlurmEnvironment._FIRST_RESERVED_STEP

    @staticmethod
    def identity(variables: Mapping[str, str]) -> Identity:
        """Derive the port from job and step, so that all tasks agree without communicating."""
        nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
        node_rank = whole_number(variables, "SLURM_NODEID", 0)
        tasks = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get(
            "SLURM_TASKS_PER_NODE", "1"
        )
        job = whole_number(variables, "SLURM_JOB_ID")
        step = whole_number(variables, "SLURM_STEP_ID", 0)
        return Identity(
            environment=SlurmEnvironment.name,
            rank=whole_number(variables, "SLURM_PROCID"),
            local_rank=whole_number(variables, "SLURM_LOCALID"),
            world_size=whole_number(
                variables, "SLURM_STEP_NUM_TASKS", whole_number(variables, "SLURM_NTASKS", 1)
            ),
            local_world_size=_tasks_per_node(tasks)[node_rank],
            node_rank=node_rank,
            main_address=variables.get("MASTER_ADDR") or first_host(nodes),
            main_port=whole_number(variables, "MASTER_PORT", 20000 + (job * 31 + step) % 10000),
        )


def first_host(node_list: str) -> str:
    """'gpu[003-005,9],login1' → 'gpu003'."""
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", node_list)
    if not match:
        return "127.0.0.1"
    prefix, first = match.groups()
    return f"{prefix}{first or ''}"


def _tasks_per_node(text: str) -> list[int]:
    """'2(x3),1' → [2, 2, 2, 1]."""
    counts: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(times or 1)
    return counts


class KubernetesEnvironment:
    """A pod of a Kubeflow training job that runs the script itself, one process per pod."""

    name: ClassVar[str] = "kubernetes"

    @staticmethod
    def detect(variables: Mapping[str, str]) -> bool:
        """True inside a cluster, with the training operator's variables but no launcher's."""
        inside = "KUBERNETES_SERVICE_HOST" in variables
        pod_level = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(variables)
        torchrun_style = {"PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR"} <= set(variables)
        return inside and "LOCAL_RANK" not in variables and (pod_level or torchrun_style)

    @staticmethod
    def identity(variables: Mapping[str, str]) -> Identity:
        """PyTorchJob sets RANK and WORLD_SIZE, TrainJob sets PET_NODE_RANK and PET_NNODES."""
        rank = whole_number(variables, "RANK", whole_number(variables, "PET_NODE_RANK", 0))
        return Identity(
            environment=KubernetesEnvironment.name,
            rank=rank,
            local_rank=0,
            # PyTorchJob's WORLD_SIZE counts processes, its RANK counts pods; PET_NNODES counts pods
            world_size=whole_number(
                variables,
                "PET_NNODES" if "PET_NNODES" in variables else "WORLD_SIZE",
            ),
            local_world_size=1,
            node_rank=rank,
            main_address=variables.get("MASTER_ADDR") or variables["PET_MASTER_ADDR"],
            main_port=whole_number(
                variables, "MASTER_PORT", whole_number(variables, "PET_MASTER_PORT", 29500)
            ),
        )


class SingleProcess:
    """No launcher: a world of one process."""

    name: ClassVar[str] = "single process"

    @staticmethod
    def detect(variables: Mapping[str, str]) -> bool:  # noqa: ARG004 - the last resort fits always
        """Always true: this environment is the last one tried."""
        return True

    @staticmethod
    def identity(variables: Mapping[str, str]) -> Identity:  # noqa: ARG004
        """Rank 0 of 1."""
        return Identity(SingleProcess.name, 0, 0, 1, 1, 0, "127.0.0.1", 0)


ENVIRONMENTS: tuple[type[ClusterEnvironment], ...] = (
    RayTrain,
    DeepSpeedLauncher,
    Torchrun,
    HorovodEnvironment,
    SlurmEnvironment,
    KubernetesEnvironment,
    SingleProcess,
)


def detect(variables: Mapping[str, str] | None = None) -> Identity:
    """Return this process's identity, from its environment variables."""
    variables = os.environ if variables is None else variables
    environment = next(env for env in ENVIRONMENTS if env.detect(variables))
    identity = environment.identity(variables)
    if not 0 <= identity.rank < identity.world_size:
        raise EnvironmentProblem(
            [
                Problem(
                    f"rank ({identity.environment})",
                    f"outside a world of {identity.world_size}",
                    "clear stale RANK and WORLD_SIZE variables, or start with the launcher",
                    identity.rank,
                )
            ]
        )
    return identity


def is_bare_rank(variables: Mapping[str, str]) -> bool:
    """True if a launcher without a supervisor started this process as a rank."""
    return HorovodEnvironment.detect(variables)
