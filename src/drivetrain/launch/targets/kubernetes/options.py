"""The options of a run on Kubernetes, and their checks. Pure."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from drivetrain.core.errors import Problem
from drivetrain.core.redaction import clean_text, is_secret, secrets_among
from drivetrain.launch.job import Job, variable_problems
from drivetrain.launch.target import option

# The options of a run on Kubernetes, in addition to the job itself.

KINDS = ("job", "jobset", "trainjob", "rayjob")


@dataclass(frozen=True)
class KubernetesOptions:
    """Every field is a flag of `drivetrain train --on kubernetes`."""

    kind: str = option("job, jobset, trainjob (Kubeflow Trainer v2) or rayjob (KubeRay)", "job")
    image: str | None = option("container image with the script in it, by tag or digest")
    workdir: str | None = option("the script's directory in the image; default: the image's own")
    namespace: str = option("namespace", "default")
    context: str | None = option("context of the kubeconfig; default: the current one")
    claim: str | None = option("PersistentVolumeClaim (ReadWriteMany) that holds the runs")
    mount_path: str = option("where it is mounted; the run directory is created below", "/runs")
    cpus: str | None = option("CPUs per node, for example 8 or 7500m")
    memory: str | None = option("memory per node, for example 64Gi")
    shm: str = option("size of /dev/shm; counts as part of the memory", "8Gi")
    gpu_resource: str = option("resource name of the GPUs", "nvidia.com/gpu")
    resource: tuple[str, ...] = option("another resource, such as vpc.amazonaws.com/efa=4", ())
    rdma: bool = option("for InfiniBand or EFA: allow locking memory (IPC_LOCK)", False)
    node_selector: tuple[str, ...] = option("label that a machine must have: KEY=VALUE", ())
    toleration: tuple[str, ...] = option("taint to tolerate: KEY[=VALUE][:EFFECT]", ())
    priority_class: str | None = option("PriorityClass")
    queue: str | None = option("Kueue's LocalQueue")
    secret: tuple[str, ...] = option("name of a Secret whose keys become environment variables", ())
    pull_secret: str | None = option("name of the Secret for pulling the image")
    service_account: str | None = option("ServiceAccount of the pods")
    run_as_user: int = option("user id in the containers", 1000)
    ray_version: str | None = option("rayjob: the version of Ray in the image, such as 2.53.0")
    max_retries: int = option("pod failures before the job fails; exit code 75 is not one", 6)


# Names that Kubernetes accepts, and the run directory as the pods see it.

# A pod of a JobSet is named NAME-node-0-INDEX-SUFFIX, in at most 63 characters.
MOST_CHARACTERS = 43
MARK_CHARACTERS = 8
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def object_name(job: Job) -> str:
    """Return the job's name plus a hash of its run, so that runs of one script do not collide."""
    plain = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")
    if plain[:1].isdigit():  # a Service's name begins with a letter
        plain = f"run-{plain}"
    return f"{plain}-{_mark(job)}"


def in_pods(job: Job, options: KubernetesOptions) -> Job:
    """Return the job with its run directory on the mounted volume.

    All users' runs are on that volume, so the directory's name contains a hash: runs whose local
    directories have the same name do not share it.
    """
    folder = f"{PurePosixPath(job.run_dir).name}-{_mark(job)}"
    return replace(job, run_dir=str(PurePosixPath(options.mount_path) / folder))


def _mark(job: Job) -> str:
    """Return a hash of the run's owner and directory, which do not change on resume."""
    whose = f"{job.owner}:{job.run_dir}"
    return hashlib.sha256(whose.encode()).hexdigest()[:MARK_CHARACTERS]


def keeps_checkpoints_in_store(job: Job) -> bool:
    """True if checkpoints go to an object store, so that no volume is needed."""
    prefix = "checkpoint.directory="
    return any(w.startswith(prefix) and "://" in w for w in job.script_args)


# Client-side checks for what Kubernetes would refuse or get wrong. Each rule is pure.

_FORM = re.compile(r"(\d+(?:\.\d+)?)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE]\d+)?")
_DECIMAL = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", start=1)}


def amount_of(text: str) -> float | None:
    """Parse a quantity; None if Kubernetes would refuse it."""
    match = _FORM.fullmatch(text)
    if match is None:
        return None
    number, unit = float(match[1]), match[2]
    if unit is None:
        return number
    if unit[0] in "eE" and unit[1:].isdigit():
        return number * 10.0 ** int(unit[1:])
    return number * {**_DECIMAL, **_BINARY}[unit]


_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_IMAGE = re.compile(r"[\w.\-/:]+?(:(?P<tag>[\w.\-]+))?(@sha256:(?P<digest>[0-9a-f]{64}))?")
_QUALIFIED = re.compile(r"([a-z0-9.\-]{1,253}/)?[A-Za-z0-9]([\w.\-]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([\w.\-]{0,61}[A-Za-z0-9])?)?")
_VERSION = re.compile(r"\d+\.\d+\.\d+[\w.+-]*")
_RESERVED = ("/", "/dev", "/dev/shm", "/proc", "/sys", "/etc", "/usr", "/tmp")  # noqa: S108

Rule = Callable[[Job, KubernetesOptions], Iterator[Problem]]


def problems(job: Job, options: KubernetesOptions) -> list[Problem]:
    """Return the problems that all rules find."""
    return [problem for rule in _RULES for problem in rule(job, options)]


def _kind(_: Job, options: KubernetesOptions) -> Iterator[Problem]:
    if options.kind not in KINDS:
        near = difflib.get_close_matches(options.kind, KINDS, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"one of {', '.join(KINDS)}"
        yield Problem("--kind", "no such kind", remedy, options.kind)


def _image(_: Job, options: KubernetesOptions) -> Iterator[Problem]:
    if options.image is None:
        remedy = "--image REGISTRY/NAME:TAG; deploy/Dockerfile builds one"
        yield Problem("--image", "pods need an image", remedy, has_value=False)
        return
    match = _IMAGE.fullmatch(options.image)
    if match is None:
        yield Problem("--image", "not an image name", "write NAME:TAG", options.image)
    elif match["digest"] is None and match["tag"] in (None, "latest"):
        rule = "a pod that is restarted later may get different code"
        yield Problem("--image", rule, "use a unique tag, or a digest", options.image)


def _name(job: Job, _: KubernetesOptions) -> Iterator[Problem]:
    name = object_name(job)
    if not LABEL.fullmatch(name) or len(name) > MOST_CHARACTERS:
        most = MOST_CHARACTERS - MARK_CHARACTERS - 1
        rule = f"must have letters or digits, and at most {most} of them"
        yield Problem("--job-name", rule, "--job-name my-run", job.name)


def _object_names(_: Job, options: KubernetesOptions) -> Iterator[Problem]:
    given = {
        "--namespace": options.namespace,
        "--claim": options.claim,
        "--priority-class": options.priority_class,
        "--queue": options.queue,
        "--pull-secret": options.pull_secret,
        "--service-account": options.service_account,
    }
    names = [(flag, name) for flag, name in given.items() if name is not None]
    for flag, name in [*names, *(("--secret", each) for each in options.secret)]:
        if flag == "--secret" and ("=" in name or clean_text(name) != name):
            rule = "must be the name of a Secret, not its content"
            remedy = "kubectl create secret generic my-keys --from-env-file FILE, --secret my-keys"
            yield Problem(flag, rule, remedy, "(not shown)")
        elif not LABEL.fullmatch(name.replace(".", "-")) or len(name) > 63:
            rule = "not a name Kubernetes accepts: lower-case letters, digits and dashes"
            yield Problem(flag, rule, f"kubectl get {_kind_of(flag)} lists them", name)


def _kind_of(flag: str) -> str:
    kinds = {"--claim": "pvc", "--pull-secret": "secret", "--queue": "localqueue"}
    return kinds.get(flag, flag.strip("-").replace("-", ""))


def _quantities(job: Job, options: KubernetesOptions) -> Iterator[Problem]:
    given = {"--cpus": options.cpus, "--memory": options.memory, "--shm": options.shm}
    for flag, text in given.items():
        if text is not None and amount_of(text) is None:
            usual = "8, or 7500m" if flag == "--cpus" else "64Gi (Gi is 2^30; GB is not a unit)"
            yield Problem(flag, "not a Kubernetes quantity", f"for example {usual}", text)
    memory = amount_of(options.memory) if options.memory else None
    shm = amount_of(options.shm)
    if memory is not None and shm is not None and shm >= memory:
        rule = f"counts as part of --memory, which is {options.memory}: nothing would be left"
        yield Problem("--shm", rule, "lower it, or increase --memory", options.shm)
    if options.memory and memory is not None and memory < 2**20:
        rule = "is less than a mebibyte: a unit is missing"
        yield Problem("--memory", rule, f"--memory {options.memory}Gi", options.memory)
    if job.gpus_per_node and job.processes_per_node > job.gpus_per_node:
        rule = f"more processes than the {job.gpus_per_node} GPUs of a node"
        remedy = f"--nproc-per-node {job.gpus_per_node}"
        yield Problem("--nproc-per-node", rule, remedy, job.processes_per_node)


def _pairs(job: Job, options: KubernetesOptions) -> Iterator[Problem]:  # noqa: ARG001
    for text in options.node_selector:
        key, has_value, value = text.partition("=")
        if not (has_value and _QUALIFIED.fullmatch(key) and _VALUE.fullmatch(value)):
            remedy = "KEY=VALUE; kubectl get nodes --show-labels lists them"
            yield Problem("--node-selector", "not a label", remedy, text)
    for text in options.resource:
        key, _, value = text.partition("=")
        if not (_QUALIFIED.fullmatch(key) and amount_of(value) is not None):
            yield Problem(
                "--resource",
                "not a resource and its amount",
                "for example vpc.amazonaws.com/efa=4",
                text,
            )


def _tolerations(job: Job, options: KubernetesOptions) -> Iterator[Problem]:  # noqa: ARG001
    for text in options.toleration:
        rest, has_effect, effect = text.partition(":")
        key, _, value = rest.partition("=")
        if not (_QUALIFIED.fullmatch(key) and _VALUE.fullmatch(value)):
            yield Problem(
                "--toleration", "not a taint", "for example nvidia.com/gpu=present:NoSchedule", text
            )
        elif has_effect and effect not in _EFFECTS:
            near = difflib.get_close_matches(effect, _EFFECTS, n=1, cutoff=0.3)
            remedy = f"did you mean {near[0]}?" if near else f"one of {', '.join(_EFFECTS)}"
            yield Problem("--toleration", f"no such effect: {effect}", remedy, text)


def _secrets(job: Job, _: KubernetesOptions) -> Iterator[Problem]:
    remedy = "put it into a Secret and give its name: --secret my-keys"
    yield from variable_problems(job)
    for name, value in (*job.environment, *job.secrets):
        if is_secret(name, value):
            rule = "looks like a secret, and would be visible to everyone who can see the job"
            yield Problem("--env", rule, remedy, f"{name}=(not shown)")
    for shown in secrets_among((*job.script_args, *job.flags)):
        rule = "looks like a secret, and would be visible to everyone who can see the job"
        remedy = "let the script read it from a variable that comes from a Secret (--secret)"
        yield Problem("the script's arguments", rule, remedy, shown)


def _directory(job: Job, options: KubernetesOptions) -> Iterator[Problem]:
    if options.claim is None and not keeps_checkpoints_in_store(job):
        rule = "checkpoints would be lost with the pod"
        remedy = "--claim PVC (ReadWriteMany), or checkpoint.directory=s3://… after the script"
        yield Problem("--claim", rule, remedy, has_value=False)
    path = PurePosixPath(options.mount_path)
    if not path.is_absolute() or ".." in path.parts or str(path) in _RESERVED:
        rule = "not a directory where a volume can be mounted"
        yield Problem("--mount-path", rule, "--mount-path /runs", options.mount_path)


def _script(job: Job, _: KubernetesOptions) -> Iterator[Problem]:
    if PurePosixPath(job.script).is_absolute() and job.script.startswith(job.working_dir):
        rule = "a path on this machine; pods see the image's files"
        relative = str(PurePosixPath(job.script).relative_to(job.working_dir))
        yield Problem("SCRIPT", rule, f"{relative}, with --workdir for its directory", job.script)


def _elastic(job: Job, options: KubernetesOptions) -> Iterator[Problem]:
    if job.is_elastic and options.kind != "rayjob":
        rule = f"a {options.kind} has a fixed number of pods"
        nodes = f"{job.num_nodes}:{job.max_nodes}"
        yield Problem("--nnodes", rule, f"--nnodes {job.num_nodes}", nodes)


def _times(job: Job, options: KubernetesOptions) -> Iterator[Problem]:
    if job.time_limit_s is not None and job.time_limit_s <= job.grace_s:
        rule = f"must be longer than the {job.grace_s:g} s allowed for saving"
        yield Problem("--time", rule, "a longer --time", job.time_limit_s)
    if options.max_retries < 0:
        yield Problem("--max-retries", "must be 0 or more", "--max-retries 6", options.max_retries)


def _ray(_: Job, options: KubernetesOptions) -> Iterator[Problem]:
    if options.kind == "rayjob" and options.ray_version is None:
        rule = "KubeRay needs the version of Ray in the image"
        yield Problem("--ray-version", rule, "--ray-version 2.53.0", has_value=False)
    elif options.ray_version is not None and not _VERSION.fullmatch(options.ray_version):
        remedy = "--ray-version 2.53.0, the image's version"
        yield Problem("--ray-version", "not a Ray version", remedy, options.ray_version)


def _user(_: Job, options: KubernetesOptions) -> Iterator[Problem]:
    if not 1 <= options.run_as_user < 2**31:
        rule = "pods must not run as root"
        remedy = "the id of the image's user, for example 1000"
        yield Problem("--run-as-user", rule, remedy, options.run_as_user)


_RULES: Sequence[Rule] = (
    _kind,
    _image,
    _name,
    _object_names,
    _quantities,
    _pairs,
    _tolerations,
    _secrets,
    _directory,
    _script,
    _elastic,
    _times,
    _ray,
    _user,
)
