"""Every config key of a run. Sections are frozen and reject unknown keys, so a typo is an error.

Names follow the tools people already use: Hugging Face's for optimisation, torchtitan's for the
mesh axes, and torch's own for settings that are passed straight to it.
A strategy's section is defined in the strategy's own folder.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field, create_model

from drivetrain.config.script_reads import OPTIMIZER_KEYS, WHOLE_CONFIG, note_read
from drivetrain.core.plugins import Plugins
from drivetrain.core.section import Section
from drivetrain.core.traits import STRATEGIES, Traits, all_traits, traits_of


class Checkpoint(Section):
    """What is saved, when and where, and how long it is kept."""

    every_steps: int | Literal["auto"] | None = "auto"
    """Number of steps between saves. auto: the interval that loses the least time, from the cost
    of a save and how often the run has failed (Young/Daly). null: never save."""
    save: Literal["sharded", "full"] = "sharded"
    """sharded: every rank writes its part. full: rank 0 gathers and writes everything."""
    contents: Literal["everything", "trained", "weights"] = "everything"
    """everything: a run can resume from it exactly. trained: the same without frozen weights
    (requires_grad=False), for example an adapter without its base model, which the script must
    recreate identically. weights: the model only."""
    asynchronous: bool = True
    """Write in the background: training waits only for a copy in memory."""
    incremental: bool = False
    """Write only the bytes that have changed since the last checkpoint. The rest stays in the files
    of earlier checkpoints, which are kept as long as a checkpoint refers to them."""
    directory: str | None = None
    """A path or an fsspec URL (s3://…). null: checkpoints/ in the run's directory."""
    keep_last: int = Field(default=2, gt=0)
    """Number of most recent checkpoints to keep."""
    keep_every: int | None = Field(default=None, gt=0)
    """Also keep every checkpoint whose step is a multiple of this."""
    keep_best: str | None = None
    """Metric, for example loss or accuracy. Save and keep a checkpoint at every evaluation that is
    the best so far. Its weights are also exported next to the final ones, to best.pt or best/."""
    keep_best_mode: Literal["min", "max"] = "min"
    """Whether the lowest or the highest value is best."""
    final_weights: Literal["auto", "whole", "sharded"] = "auto"
    """Format of the weights exported at the end of a run. whole: weights.pt, gathered on rank 0.
    sharded: weights/, safetensors in Hugging Face layout next to the checkpoints, written by all
    ranks. auto: whole up to 1 GiB of weights, sharded above. The best weights use the same
    format."""
    resume_from: str | None = None
    """Start from the newest checkpoint of another run (the run's directory or its checkpoint
    directory), or from one checkpoint's directory (…/step-000000024-a1)."""


class PowerSGD(Section):
    """torch's PowerSGD hook: sends each gradient matrix as the product of two low-rank matrices."""

    rank: int = Field(default=4, gt=0)
    """Rank of the approximation. A higher rank is more accurate and sends more data."""
    start_step: int = Field(default=10, ge=2)
    """First step with compression; earlier steps send gradients whole. torch needs at least 2."""
    min_compression_rate: float = Field(default=2.0, ge=0)
    """Matrices that would shrink by less than this factor are sent whole."""


class TopK(Section):
    """Sends only the largest gradients; the rest is added to the next step's gradients."""

    ratio: float = Field(default=0.01, gt=0, le=1)
    """Fraction of each bucket that is sent."""


class Communication(Section):
    """Gradient compression for ddp on more than one rank."""

    compression: Literal["none", "fp16", "bf16", "powersgd", "topk", "auto"] = "none"
    """fp16 and bf16 halve the traffic; powersgd and topk reduce it much further, but are lossy.
    auto: measure, and keep uncompressed gradients unless one of `allow` makes steps shorter."""
    allow: tuple[Literal["fp16", "bf16", "powersgd", "topk"], ...] = ("bf16", "fp16")
    """Methods that auto may choose from; the first wins a tie."""
    powersgd: PowerSGD = PowerSGD()
    """Options for powersgd."""
    topk: TopK = TopK()
    """Options for topk."""


class Compile(Section):
    """torch.compile, off by default."""

    enabled: bool = False
    """Compile the model."""
    backend: str = "inductor"
    """Compiler backend."""
    mode: str | None = None
    """torch.compile's mode, for example max-autotune."""


class Data(Section):
    """How samples are loaded. No setting here changes which samples make up a step."""

    shuffle: bool = True
    """Shuffle each epoch in an order drawn from the seed. A DataLoader passed to fit() decides for
    itself."""
    num_workers: int = Field(default=0, ge=0)
    """Loader processes per rank."""
    prefetch_factor: int = Field(default=2, gt=0)
    """Micro-batches that each loader process prefetches."""
    pin_memory: bool | Literal["auto"] = "auto"
    """Use page-locked memory for faster copies to the device. auto: on an accelerator."""
    iterable_sharding: Literal["same_stream", "own_shard", "already_sharded"] = "same_stream"
    """same_stream: every rank reads the whole stream and keeps its part; results are the same at
    any world size. own_shard: each rank reads only the shard that the dataset's
    shard(num_shards, index) returns. already_sharded: the dataset yields each rank its own part
    (split_dataset_by_node, split_by_node). With own_shard and already_sharded, results depend on
    the world size."""
    batched: bool | Literal["auto"] = "auto"
    """Whether a stream yields ready-made batches, each used as one micro-batch. auto: true if it is
    wrapped in a DataLoader with batch_size=None."""


class Evaluation(Section):
    """When and how the validation data is evaluated. Every sample counts exactly once."""

    every_steps: int | None = Field(default=None, gt=0)
    """Number of steps between evaluations. null: at the end of each epoch and of the run."""
    batch_size: int | None = Field(default=None, gt=0)
    """Samples per forward pass. null: micro_batch_size if it is a number, else at most 32."""
    max_samples: int | None = Field(default=None, gt=0)
    """Use only the first N samples of each validation set. null: all of them."""


class EarlyStopping(Section):
    """Ends a run for good when evaluation results stop improving. Off by default."""

    metric: str = "loss"
    """Evaluation metric to watch: loss, accuracy, …"""
    mode: Literal["min", "max"] = "min"
    """Whether lower or higher is better."""
    patience: int | None = Field(default=None, gt=0)
    """End the run after this many evaluations in a row without an improvement on the best."""
    min_delta: float = Field(default=0.0, ge=0)
    """An evaluation counts as better only if it improves on the best by more than this."""
    limits: tuple[tuple[int, float], ...] = ()
    """Pairs of a step and a value: end if the first evaluation at or after that step is worse."""


class Memory(Section):
    """Settings that trade time for memory."""

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """full: recompute each repeated block's activations in backward instead of keeping them.
    selective: keep the outputs of matrix products and attention, recompute the rest."""
    offload: Literal["none", "cpu"] = "none"
    """cpu: keep fsdp's shards of weights, gradients and optimizer state in host memory."""


class Model(Section):
    """Where the model's initial weights come from."""

    pretrained: str | None = None
    """A directory of safetensors in Hugging Face layout, a single such file, an fsspec URL of
    either, or a hub id. Each rank reads only its own shards."""
    pretrained_allow: tuple[str, ...] = ()
    """Patterns (`head.*`) of tensors that may be missing from the files, have a different shape
    there, or exist only there. The model's tensors among them are initialised instead."""
    initialization: Literal["auto", "sequential", "keyed"] = "auto"
    """sequential: the same weights as the same code without Drivetrain under this seed; if the
    model is sharded, every rank draws all values, one tensor at a time (100 million per second).
    keyed: each tensor is drawn from its own key, and a rank draws only the tensors of which it
    holds a part. Both give the same weights at any number of ranks. auto: sequential, or keyed if
    `pretrained` is set."""


_WHOLE = ("__dict__", "model_dump", "model_dump_json")
"""What reads all keys of a section at once."""


class Optimization(Section):
    """Learning rate, optimizer and gradient clipping. Steps are optimizer steps."""

    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak learning rate of the optimizer made from the config, before `learning_rate_scaling`; a
    script's own optimizer sets its own."""
    lr_scheduler_type: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt", "none"] = (
        "constant"
    )
    """Shape of the schedule after warm-up. wsd: constant, then a linear decay at the end.
    inverse_sqrt: 1/√step. none: the script sets the rate, and Drivetrain never changes it."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    """Warm-up as a fraction of the run's steps, rounded up. Set this or `warmup_steps`, not
    both."""
    decay_steps: int | None = Field(default=None, gt=0)
    """Number of steps over which the rate decays. linear, cosine: the first ones after the warm-up,
    then the rate stays at its minimum; null: until the end of the run. wsd: the last ones; null: a
    tenth of the run."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Minimum of a decaying rate, as a fraction of the peak."""
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Scale `learning_rate` by (global_batch_size / base_batch_size), or by its square root."""
    base_batch_size: int | None = Field(default=None, gt=0)
    """The global batch size that `learning_rate` was tuned for."""
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    """Optimizer of a script that makes none. muon: Muon for the matrices of the model's blocks,
    AdamW for embeddings, heads, norms and biases."""
    momentum: float | None = Field(default=None, ge=0, lt=1)
    """Momentum of sgd (null: 0) and muon (null: 0.95)."""
    muon_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which Muon orthogonalises matrices. bf16 is faster on accelerators, but amplifies
    rounding differences between layouts: losses agree to about 1e-4 instead of 1e-7."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of the optimizer made from the config; a script's own optimizer sets its own."""
    decay_norms_and_biases: bool = False
    """true: `weight_decay` applies to all weights. false: only to those with two or more dimensions
    (matrices, kernels and embeddings, but not norms and biases)."""
    adamw_implementation: Literal["auto", "for_loop", "foreach", "fused"] = "auto"
    """How AdamW updates the weights: one at a time (for_loop), many in one call (foreach), or in
    one kernel (fused, the fastest). auto: torch's choice: for_loop on a CPU; foreach on CUDA, XPU
    and out-of-tree devices. Their results differ in the last bits."""
    max_grad_norm: float | None = Field(default=None, gt=0)
    """Clip the global gradient norm to this. null: no clipping."""

    def __getattribute__(self, name: str) -> Any:
        """Return an attribute; what the script reads here, it may use in its own optimizer."""
        if name in OPTIMIZER_KEYS:
            note_read(name)
        elif name in _WHOLE:
            note_read(*OPTIMIZER_KEYS)
        return super().__getattribute__(name)

    def __iter__(self) -> Generator[tuple[str, Any], None, None]:
        """Iterate over keys and values, as `dict(section)` does."""
        note_read(*OPTIMIZER_KEYS)
        return super().__iter__()

    @property
    def needs_the_end(self) -> bool:
        """True if the learning rate depends on where the run ends."""
        falls_to_it = self.lr_scheduler_type in ("linear", "cosine") and self.decay_steps is None
        return falls_to_it or self.lr_scheduler_type == "wsd" or self.warmup_ratio > 0


S = TypeVar("S", bound=Section)
if TYPE_CHECKING:
    StrategyName = str
else:
    StrategyName = Literal[STRATEGIES.names]


class Tensor(Section):
    """How each layer is sharded over the `tp` ranks."""

    plan: str | tuple[str, ...] = "model"
    """model: the model's own `tp_plan` (Hugging Face models have one). module:function: a function
    that takes the model and returns such a plan. Or a list such as
    [blocks.*.up=colwise, blocks.*.down=rowwise]."""
    sequence_parallel: bool = False
    """Shard the sequence between the layers as well: norms and residuals take 1/tp of the
    memory."""
    loss_parallel: bool = False
    """Keep the logits sharded and compute the cross-entropy on the shards: the last layer's output
    is never gathered."""


class Pipeline(Section):
    """How the layers are split over the `pp` ranks."""

    schedule: Literal[
        "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zero_bubble", "zbv", "dualpipev"
    ] = "1f1b"
    """Order in which micro-batches run forward and backward. All schedules but gpipe and 1f1b give
    each rank several stages."""
    split_points: tuple[str, ...] = ()
    """Names of the blocks at which a new stage starts, without the first. Empty: balanced."""
    balance: Literal["parameters", "time"] = "parameters"
    """What stages are balanced by: the number of weights, or each block's measured time."""
    stages_per_rank: int = Field(default=2, gt=0)
    """Stages per rank, for schedules with several."""


class Expert(Section):
    """Options for expert parallelism."""

    modules: tuple[str, ...] = ()
    """Names of the modules that hold experts, with * for a number (blocks.*.experts). Empty: every
    module with num_experts, weights with one row per expert, and
    forward(hidden_states, top_k_index, top_k_weights)."""
    imbalance: float = Field(default=1.0, ge=1)
    """For rehearsals only, which have no tokens to route: the load a rank is assumed to receive, as
    a multiple of an even share of its group's tokens. A run ignores it."""


class Parallel(Section):
    """How the model is distributed over ranks."""

    strategy: StrategyName = Field(
        default=STRATEGIES.names[0],
        description=" ".join(f"{each.name}: {each.summary}." for each in all_traits()),
    )
    dp_replicate: int | Literal["auto"] = "auto"
    """Number of model replicas. With dp_shard > 1: replicas of the sharded model (HSDP)."""
    dp_shard: int | Literal["auto"] = "auto"
    """Number of ranks over which one replica is sharded."""
    tp: int = Field(default=1, gt=0)
    """Tensor parallelism: number of ranks over which each layer is sharded."""
    pp: int = Field(default=1, gt=0)
    """Pipeline parallelism: number of ranks over which the layers are split."""
    cp: int = Field(default=1, gt=0)
    """Context parallelism: number of ranks over which each sequence is split."""
    ep: int = Field(default=1, gt=0)
    """Expert parallelism: number of ranks over which each layer's experts are split. It is part of
    dp_shard and must divide it."""
    tensor: Tensor = Tensor()
    """Options for tp."""
    pipeline: Pipeline = Pipeline()
    """Options for pp."""
    expert: Expert = Expert()
    """Options for ep."""
    sync_batch_norm: bool = False
    """Compute batch-norm statistics over the micro-batches of all data-parallel ranks instead of
    each rank's own; on any device."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds a collective may wait for the other ranks."""

    @property
    def traits(self) -> Traits:
        """Traits of the strategy."""
        return traits_of(self.strategy)

    @property
    def options(self) -> Section:
        """The strategy's own section."""
        section: Section = getattr(self, self.strategy)
        return section

    def details(self, kind: type[S]) -> S:
        """Return a strategy's section, by its type."""
        sections = (getattr(self, name) for name in type(self).model_fields)
        return next(section for section in sections if isinstance(section, kind))


if not TYPE_CHECKING:
    # add a section for each registered strategy, Drivetrain's own or another package's
    Parallel = create_model(
        "Parallel",
        __base__=Parallel,
        __module__=__name__,
        __doc__=Parallel.__doc__,
        **{
            each.name: (
                each.section,
                Field(default=each.section(), description=f"Options for strategy {each.name}."),
            )
            for each in all_traits()
        },
    )


class Scaler(Section):
    """torch.amp.GradScaler's settings, used if precision.dtype is fp16."""

    init_scale: float = Field(default=65536.0, gt=0)
    """Initial loss scale."""
    growth_factor: float = Field(default=2.0, gt=1)
    """Multiply the scale by this after `growth_interval` steps in a row without overflow."""
    backoff_factor: float = Field(default=0.5, gt=0, lt=1)
    """Multiply the scale by this after a step that overflowed."""
    growth_interval: int = Field(default=2000, gt=0)
    """Steps in a row without overflow before the scale grows."""
    max_skipped_steps: int = Field(default=20, gt=0)
    """End the run after this many skipped steps in a row. A step with infinite or NaN gradients is
    skipped; a few at the start of a run are normal, while the scale adapts."""


class Precision(Section):
    """Number formats. Weights and optimizer state stay in fp32."""

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Compute dtype of the model; bf16 and fp16 run under autocast."""
    tf32: bool | None = None
    """Use TF32 tensor cores, which round to 10 bits, for fp32 matrix products and convolutions.
    true: both (as torch.set_float32_matmul_precision("high") and torch.backends.cudnn.allow_tf32
    do). false: neither. null: as the script has set them (torch's default: convolutions only); with
    reproducibility=bitwise, null means false."""
    float8: Literal["none", "rowwise"] = "none"
    """rowwise: linear layers compute in 8 bits with one scale per row, using torchao, on tensor
    cores that support it. Weights, gradients and optimizer state keep their format."""
    float8_skip: tuple[str, ...] = ("*head", "*output", "*classifier")
    """Patterns of layers that float8 leaves unchanged."""
    scaler: Scaler = Scaler()
    """Loss scaling for fp16."""


SINKS = Plugins(
    "drivetrain.sinks",
    {
        "tensorboard": "drivetrain.record.sinks:TensorBoardSink",
        "jsonl": "drivetrain.record.sinks:JsonlSink",
        "mlflow": "drivetrain.record.sinks:MLflowSink",
        "prometheus": "drivetrain.record.sinks:PrometheusSink",
        "wandb": "drivetrain.record.sinks:WandbSink",
    },
)
"""Sinks by name; other packages add theirs through an entry point. A sink's library may be slow to
import, so each is imported only when it is used."""
if TYPE_CHECKING:
    SinkName = str
else:
    SinkName = Literal[SINKS.names]


class MLflow(Section):
    """Settings of the sink mlflow."""

    tracking_uri: str | None = None
    """A server, or a store such as sqlite:///mlflow.db. null: MLFLOW_TRACKING_URI, or mlflow.db
    next to the run's directory."""
    experiment: str = "drivetrain"
    """Name of the experiment; created if it does not exist."""
    run_id: str | None = None
    """An MLflow run that is already open: metrics are written to it, and it is left open. null:
    create a run."""


class Prometheus(Section):
    """The address at which the sink prometheus serves metrics on every node."""

    port: int = Field(default=9464, ge=0, le=65535)
    """Port to listen on. If it is taken, another is used, which is recorded in prometheus/ next to
    the run's directory."""
    host: str = "127.0.0.1"
    """Address to listen on. By default only this machine can read the metrics; use 0.0.0.0 for a
    Prometheus server on another machine."""


class Wandb(Section):
    """Settings of the sink wandb."""

    project: str = "drivetrain"
    """Name of the project."""
    mode: Literal["offline", "online"] = "offline"
    """offline: write to the run's directory, for `wandb sync`. online: send to the server you are
    logged in to."""


class Record(Section):
    """What a run records and prints."""

    logging_steps: int = Field(default=10, gt=0)
    """Number of steps between metrics, which are reduced over ranks, recorded and printed."""
    sinks: Literal["auto"] | tuple[SinkName, ...] = "auto"
    """Where scalars go besides the event files. auto: TensorBoard, if it is installed."""
    system_every_s: float | None = Field(default=10.0, gt=0)
    """Seconds between samples of each node's CPU, memory, network and GPUs, which go to the sinks
    if psutil is installed. null: never."""
    price_per_device_hour: float | None = Field(default=None, ge=0)
    """Price of one rank's device per hour, in any currency: `drivetrain status` adds up the
    cost."""
    mlflow: MLflow = MLflow()
    """Options for the sink mlflow."""
    prometheus: Prometheus = Prometheus()
    """Options for the sink prometheus."""
    wandb: Wandb = Wandb()
    """Options for the sink wandb."""
    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    """Progress display of rank 0. auto: rich on a terminal, plain lines elsewhere."""
    log_ranks: Literal["first", "all"] = "first"
    """Ranks whose Python `logging` output reaches the console. first: all of rank 0's, and warnings
    and errors of the others. all: every rank's, each line labelled with its rank."""


class Sentinel(Section):
    """Checks for silent errors: replicas whose weights differ, and ranks that miscalculate."""

    every_steps: int | None = Field(default=100, gt=0)
    """Number of steps between checks that the replicas' weights are bit-for-bit equal; every save
    and the end of the run are checked as well. The run stops if they differ. null: never. Needs
    replicas: ddp, or fsdp with dp_replicate."""
    replay_every_steps: int | None = Field(default=None, gt=1)
    """Number of steps between replays, which compute a micro-batch twice; the run stops if a rank's
    gradients are not bit-for-bit equal, the sign of a faulty processor. null: never."""


# The whole config: the keys of a run itself, and its sections.


class RunConfig(Section):
    """The config of one run."""

    global_batch_size: int = Field(gt=0)
    """Samples per optimizer step over all ranks. The number of ranks never changes it."""
    micro_batch_size: int | Literal["auto"] = "auto"
    """Samples per forward and backward pass. auto: each rank's whole share of the batch."""
    max_steps: int | None = Field(default=None, gt=0)
    """Number of optimizer steps in the run; takes precedence over num_train_epochs."""
    num_train_epochs: int | None = Field(default=None, gt=0)
    """Passes over the training data."""
    max_time_s: float | None = Field(default=None, gt=0)
    """Seconds of training, including earlier attempts, after which the run saves and is
    finished."""
    stop_at_step: int | None = Field(default=None, gt=0)
    """Evaluate, save and stop after this step; schedules still follow the run's full length. The
    same command with a higher value, or none, resumes the run bit for bit."""
    seed: int = Field(default=42, ge=0, lt=2**63)
    """Determines sample order, initial weights and dropout."""
    reproducibility: Literal["standard", "bitwise"] = "standard"
    """bitwise: the same weights, bit for bit, at any number of data-parallel ranks."""
    fault_tolerance: Literal["restart", "live"] = "restart"
    """restart: after a failure, all ranks restart from the last checkpoint. live: ddp replicas
    continue without the lost one, which rejoins by itself (`drivetrain train --live`)."""
    name: str | None = Field(default=None, coerce_numbers_to_str=True)
    """Name of the run. null: the time it started."""
    output_dir: Path = Path("runs")
    """Directory in which run directories are created."""
    model: Model = Model()
    """Where the model's initial weights come from."""
    optimization: Optimization = Optimization()
    """Learning rate, schedule, optimizer, clipping."""
    precision: Precision = Precision()
    """Number formats."""
    parallel: Parallel = Parallel()
    """How the model is distributed over ranks."""
    communication: Communication = Communication()
    """Gradient compression."""
    memory: Memory = Memory()
    """Activation checkpointing and offload."""
    compile: Compile = Compile()
    """torch.compile."""
    data: Data = Data()
    """Data loading."""
    evaluation: Evaluation = Evaluation()
    """Validation."""
    early_stopping: EarlyStopping = EarlyStopping()
    """Ending a run early, by its evaluations."""
    checkpoint: Checkpoint = Checkpoint()
    """Saving and resuming."""
    record: Record = Record()
    """Events, sinks, progress."""
    sentinel: Sentinel = Sentinel()
    """Checks for silent errors."""

    def model_dump(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return all values as a dict, from which the script may use any."""
        note_read(WHOLE_CONFIG)
        return super().model_dump(*args, **kwargs)
