"""make_slurm: a real Slurm on hosts of one machine, to submit to and to crash, from a test.

with make_slurm(2) as cluster:
    job = cluster.run(["sbatch", "--parsable", "job.sh"]).strip()
    cluster.wait_for(job, "RUNNING")
    cluster.crash(cluster.nodes[1])
    cluster.boot(cluster.nodes[1])
    cluster.wait_for(job, "COMPLETED")

munged, slurmctld and a slurmd per host are the distribution's own; only times that production keeps
long are short. The nodes are h1, h2, …; one host more is the controller and the login node. There
is no accounting, so `sacct` has nothing to say.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from drivetrain.core.errors import DrivetrainError, EnvironmentProblem, Problem
from drivetrain.testing.hosts import Host, hosts_available, make_hosts

_TOOLS = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "munged": "munge"}
_SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin"
_START_S = 30.0

_CONF = """\
ClusterName=test
SlurmctldHost={login.name}({login.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# a requeued job waits until the credentials of its first life have run out: two minutes by default
AuthInfo=socket={folder}/munge.sock,cred_expire={requeue_delay_s}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=6
KillWait=5
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=100000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime={grace_s}
PartitionName=urgent Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""


@dataclass
class SlurmCluster:
    """A controller, which is also the login node, and its nodes."""

    login: Host
    nodes: tuple[Host, ...]
    folder: Path
    _daemons: dict[str, subprocess.Popen[str]] = field(default_factory=dict, repr=False)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to reach this Slurm and no other."""
        kept = {name: v for name, v in os.environ.items() if not name.startswith("SLURM_")}
        return {**kept, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(
        self,
        command: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> str:
        """Run a command on the login node; what it printed."""
        environment = {**self.environment, **(env or {})}
        return self.login.run(command, env=environment, cwd=cwd, timeout_s=timeout_s).stdout

    def state(self, job: str) -> str:
        """In Slurm's words: PENDING, RUNNING, COMPLETED."""
        words = self.run(["scontrol", "show", "job", "-o", job]).split()
        return next(word.partition("=")[2] for word in words if word.startswith("JobState="))

    def wait_for(self, job: str, state: str, timeout_s: float = 60.0) -> None:
        """Until the job is in this state."""
        deadline_s = time.monotonic() + timeout_s
        while (found := self.state(job)) != state:
            if time.monotonic() > deadline_s:
                raise DrivetrainError(f"job {job} is {found}, not {state}, after {timeout_s:g} s")
            time.sleep(0.2)

    def crash(self, node: Host) -> None:
        """Kill everything on a node, its slurmd included; the controller notices by itself."""
        node.crash()
        self._daemons.pop(node.name, None)

    def boot(self, node: Host) -> None:
        """Start slurmd on a node, as a machine does when it comes up."""
        self._start(node.name, node, ["slurmd", "-D"])

    def boot_controller(self) -> None:
        """Start slurmctld."""
        self._start("slurmctld", self.login, ["slurmctld", "-D", "-c"])

    def wait_until_idle(self) -> None:
        """Until the controller sees every node ready for jobs."""
        wanted = len(self.nodes)
        deadline_s = time.monotonic() + _START_S
        said = ""
        while time.monotonic() < deadline_s:
            asked = self.login.popen(
                [_tool("sinfo"), "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N"],
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            said, _ = asked.communicate(timeout=30)
            if asked.returncode == 0 and len(said.split()) == wanted:
                return
            time.sleep(0.1)
        raise DrivetrainError(f"Slurm did not come up within {_START_S:g} s: {said}\n{self.log()}")

    def log(self) -> str:
        """The ends of all daemons' logs."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"── {path.name}\n{path.read_text()[-2000:]}" for path in files)

    def _start(self, name: str, host: Host, command: list[str]) -> None:
        output = (self.folder / f"{name}.out").open("a")
        with output:
            self._daemons[name] = host.popen(
                [_tool(command[0]), *command[1:]],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )


def slurm_available() -> str | None:
    """None when a Slurm can be made here, else the reason why not."""
    missing = [name for name in _TOOLS if shutil.which(name, path=_SEARCH) is None]
    if missing:
        packages = sorted({_TOOLS[name] for name in missing})
        return f"no {', '.join(missing)}; apt-get install -y {' '.join(packages)}"
    return hosts_available()


@contextmanager
def make_slurm(
    num_nodes: int,
    *,
    gpus_per_node: int = 0,
    cpus_per_node: int = 4,
    requeue_delay_s: int = 5,
    grace_s: int = 20,
) -> Iterator[SlurmCluster]:
    """A cluster with partitions `main` and `urgent`, which takes nodes from main's jobs.

    A preempted job has `grace_s` to save; a requeued one waits `requeue_delay_s` (at least 5).
    GPUs are stand-ins: Slurm counts them and names them to the tasks; nothing is behind them.
    """
    if reason := slurm_available():
        remedy = "skip the test where slurm_available() gives a reason"
        raise EnvironmentProblem([Problem("make_slurm", reason, remedy, has_value=False)])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dt-slurm-")))
        *nodes, login = stack.enter_context(make_hosts(num_nodes + 1))
        cluster = SlurmCluster(login, tuple(nodes), folder)
        gpus = f" Gres=gpu:{gpus_per_node}" if gpus_per_node else ""
        lines = [
            f"NodeName={node.name} NodeAddr={node.address} CPUs={cpus_per_node} RealMemory=4000"
            f"{gpus} State=UNKNOWN"
            for node in nodes
        ]
        text = _CONF.format(
            login=login,
            folder=folder,
            nodes="\n".join(lines),
            requeue_delay_s=requeue_delay_s,
            grace_s=grace_s,
        )
        (folder / "slurm.conf").write_text(text)
        (folder / "state").mkdir()
        if gpus_per_node:
            _write_gres(folder, gpus_per_node)
        stack.enter_context(_munged(folder))
        cluster.boot_controller()
        for node in nodes:
            cluster.boot(node)
        cluster.wait_until_idle()
        yield cluster


def _write_gres(folder: Path, count: int) -> None:
    for number in range(count):
        # a device as good as any: Slurm only looks whether it is one
        os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{count - 1}]\n")


@contextmanager
def _munged(folder: Path) -> Iterator[None]:
    """Slurm's daemons and tools trust each other by it; a socket of the test's own."""
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    names = {"socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    flags = [f"--{flag}={folder}/munge.{ending}" for flag, ending in names.items()]
    command = [_tool("munged"), "--foreground", "--force", f"--key-file={key}", *flags]
    with (folder / "munged.out").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        deadline_s = time.monotonic() + _START_S
        while not (folder / "munge.sock").exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise DrivetrainError(f"munged: {(folder / 'munged.out').read_text()}")
            time.sleep(0.02)
        yield
    finally:
        process.terminate()
        process.wait(10)


def _tool(name: str) -> str:
    return shutil.which(name, path=_SEARCH) or name
