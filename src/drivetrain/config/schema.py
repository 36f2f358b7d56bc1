"""Every key a run understands. Frozen, and strict about names: a typo is an error, not a default.

Names are the ones people already have in their fingers: Hugging Face's for optimisation,
torchtitan's for the axes, torch's own for what is handed straight to it.
A strategy's section stands in its own folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from pydantic import Field, create_model

from drivetrain.core.plugins import Plugins
from drivetrain.core.section import Section
from drivetrain.core.traits import STRATEGIES, Traits, all_traits, traits_of


class Checkpoint(Section):
    """What is saved, when, where, and how long it is kept."""

    every_steps: int | Literal["auto"] | None = "auto"
    """Save each so many steps. auto: the interval that loses the least, from what a save costs and
    how often the run has failed (Young, Daly). null: never."""
    save: Literal["sharded", "full"] = "sharded"
    """sharded: every rank writes its part. full: rank 0 gathers and writes everything."""
    contents: Literal["everything", "trained", "weights"] = "everything"
    """everything: a run can resume from it exactly. trained: the same without weights that are not
    trained (requires_grad): an adapter without its base, which the script makes again and which
    must be the same. weights: the model alone."""
    asynchronous: bool = True
    """Write beside the steps, which wait only for a copy in memory."""
    incremental: bool = False
    """Write only what has changed since the last checkpoint, byte by byte. The rest stays in files
    of earlier ones, which are kept as long as a checkpoint refers to them."""
    directory: str | None = None
    """A path, or any fsspec address (s3://…); null: checkpoints/ in the run's directory."""
    keep_last: int = Field(default=2, gt=0)
    """Keep the newest so many."""
    keep_every: int | None = Field(default=None, gt=0)
    """Also keep those whose step is a multiple of this."""
    keep_best: str | None = None
    """Save at every evaluation that is the best so far by this metric, for example loss or
    accuracy, and keep it. Its weights are left beside the last ones, in best.pt or best/."""
    keep_best_mode: Literal["min", "max"] = "min"
    """Whether the lowest or the highest is best."""
    final_weights: Literal["auto", "whole", "sharded"] = "auto"
    """What the end of a run leaves. whole: weights.pt, gathered on rank 0. sharded: the folder
    weights/ of safetensors in Hugging Face layout, written by all ranks, beside the checkpoints.
    auto: weights.pt up to 1 GiB of weights, the folder above. The same for the best ones."""
    resume_from: str | None = None
    """Start from the newest checkpoint of another run: its directory or its checkpoints'; or from
    one checkpoint, by its own folder (…/step-000000024-a1)."""


class PowerSGD(Section):
    """torch's PowerSGD hook: each gradient matrix as the product of two thin ones."""

    rank: int = Field(default=4, gt=0)
    """Columns of the thin matrices: more is closer to the gradient, and more to send."""
    start_step: int = Field(default=10, ge=2)
    """Steps before it that send gradients whole; torch needs two."""
    min_compression_rate: float = Field(default=2.0, ge=0)
    """Matrices that would shrink by less than this travel whole."""


class TopK(Section):
    """Only the largest gradients travel; the rest is added to the next step's."""

    ratio: float = Field(default=0.01, gt=0, le=1)
    """The fraction of each bucket that is sent."""


class Communication(Section):
    """What gradients look like on the wire, with ddp on more than one rank."""

    compression: Literal["none", "fp16", "bf16", "powersgd", "topk", "auto"] = "none"
    """fp16 and bf16 halve the traffic; powersgd and topk shrink it much more, and are lossy. auto:
    measures, and keeps plain gradients unless one of `allow` makes steps shorter."""
    allow: tuple[Literal["fp16", "bf16", "powersgd", "topk"], ...] = ("bf16", "fp16")
    """What auto may choose from; the first of equals wins."""
    powersgd: PowerSGD = PowerSGD()
    """Details for powersgd."""
    topk: TopK = TopK()
    """Details for topk."""


class Compile(Section):
    """torch.compile, off unless asked for."""

    enabled: bool = False
    """Compile the model."""
    backend: str = "inductor"
    """Compiler backend."""
    mode: str | None = None
    """torch.compile's mode, for example max-autotune."""


class Data(Section):
    """How samples reach the model. None of it changes which samples make up a step."""

    shuffle: bool = True
    """Draw a new order each epoch from the seed; a DataLoader passed to fit() decides itself."""
    num_workers: int = Field(default=0, ge=0)
    """Loader processes per rank."""
    prefetch_factor: int = Field(default=2, gt=0)
    """Micro-batches each loader process keeps ready."""
    pin_memory: bool | Literal["auto"] = "auto"
    """Page-locked memory for faster copies to a device; auto: on an accelerator."""
    iterable_sharding: Literal["same_stream", "own_shard", "already_sharded"] = "same_stream"
    """same_stream: every rank reads the stream and keeps its part: same numbers at any world size.
    own_shard: a rank reads only the shard that the dataset's shard(num_shards, index) gives it.
    already_sharded: the dataset yields each rank its own part (split_dataset_by_node,
    split_by_node). With shards the numbers depend on the world size."""
    batched: bool | Literal["auto"] = "auto"
    """Whether a stream yields ready batches; each is then a micro-batch. auto: if it comes in a
    DataLoader with batch_size=None."""


class Evaluation(Section):
    """When and how the validation data is gone through. Every sample counts exactly once."""

    every_steps: int | None = Field(default=None, gt=0)
    """Evaluate each so many steps; null: at the end of each epoch, and of the run."""
    batch_size: int | None = Field(default=None, gt=0)
    """Samples per forward; null: micro_batch_size if that is stated, else at most 32."""
    max_samples: int | None = Field(default=None, gt=0)
    """Of each set of validation data only the first so many; null: all of them."""


class EarlyStopping(Section):
    """Ending a run for good when its evaluations are not good enough. Off unless asked for."""

    metric: str = "loss"
    """Of the evaluations: loss, accuracy …"""
    mode: Literal["min", "max"] = "min"
    """Whether lower or higher is better."""
    patience: int | None = Field(default=None, gt=0)
    """End after so many evaluations in a row that were not better than the best before them."""
    min_delta: float = Field(default=0.0, ge=0)
    """Better is: by more than this."""
    limits: tuple[tuple[int, float], ...] = ()
    """Pairs of a step and a value: end if the first evaluation at or after that step is worse."""


class Memory(Section):
    """Trading time for memory."""

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """full: recompute each repeated block's activations in backward instead of keeping them.
    selective: keep what matrix products and attention gave, recompute the rest."""
    offload: Literal["none", "cpu"] = "none"
    """cpu: fsdp's shards of weights, gradients and optimizer state wait in the host's memory."""


class Model(Section):
    """Where the model's first weights come from."""

    pretrained: str | None = None
    """A folder of safetensors in Hugging Face's layout, one such file, an fsspec address of either,
    or a hub id. Each rank reads its shards, and nothing else."""
    pretrained_allow: tuple[str, ...] = ()
    """Patterns (`head.*`) of tensors that the files may lack, have in another shape or have in
    addition; what the model has of them is initialised."""
    initialization: Literal["auto", "sequential", "keyed"] = "auto"
    """sequential: the weights that the same code makes without Drivetrain under this seed; where
    ranks hold parts, each draws every value, one tensor at a time (100 million a second). keyed:
    each tensor under a key of its own; a rank draws only the tensors it holds a part of. Both are
    the same at any number of ranks. auto: sequential, or keyed beside `pretrained`."""


class Optimization(Section):
    """The learning rate and what is done to gradients. All of it counts optimizer steps."""

    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak learning rate, before `learning_rate_scaling`."""
    lr_scheduler_type: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt", "none"] = (
        "constant"
    )
    """Shape of the schedule after warm-up. wsd: level, and a linear fall at the end. inverse_sqrt:
    by 1/√step. none: the rate is the script's own, and never touched."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    """The same as a fraction of the run's steps, rounded up; one of the two."""
    decay_steps: int | None = Field(default=None, gt=0)
    """Steps the rate falls for. linear, cosine: the first after the warm-up, then it stays at its
    lowest; null: up to the end of the run. wsd: the last; null: a tenth of the run."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """The lowest that a falling rate comes to, as a fraction of the peak."""
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Scale `learning_rate` by (global_batch_size / base_batch_size), or by its square root."""
    base_batch_size: int | None = Field(default=None, gt=0)
    """The global batch size that `learning_rate` was tuned for."""
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    """For a task without an optimizer of its own. muon: for the matrices of the model's blocks;
    AdamW for embeddings, heads, norms and biases."""
    momentum: float | None = Field(default=None, ge=0, lt=1)
    """Of sgd (null: 0) and muon (null: 0.95)."""
    muon_dtype: Literal["fp32", "bf16"] = "fp32"
    """What Muon orthogonalises matrices in. bf16 is faster on accelerators, but small differences
    of rounding between layouts grow: losses then agree to about 1e-4 instead of 1e-7."""
    weight_decay: float = Field(default=0.0, ge=0)
    """For the config's optimizer; a task with its own optimizer sets its own."""
    decay_norms_and_biases: bool = False
    """Whether the config's optimizer's weight decay reaches all weights, or only those with two
    dimensions and more: matrices, kernels and embeddings, but no norms and biases."""
    adamw_implementation: Literal["auto", "for_loop", "foreach", "fused"] = "auto"
    """How AdamW goes through the weights: one after the other, many in one call, or in one kernel.
    auto: as torch chooses: for_loop on a CPU, foreach on CUDA, XPU and devices from outside torch.
    They round differently in the last bits; fused is the fastest."""
    max_grad_norm: float | None = Field(default=None, gt=0)
    """Clip the global gradient norm to this; null leaves gradients alone."""

    @property
    def needs_the_end(self) -> bool:
        """Whether the learning rate depends on where the run ends."""
        falls_to_it = self.lr_scheduler_type in ("linear", "cosine") and self.decay_steps is None
        return falls_to_it or self.lr_scheduler_type == "wsd" or self.warmup_ratio > 0


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


class Expert(Section):
    """Details of expert parallelism."""

    modules: tuple[str, ...] = ()
    """Names of the modules that hold experts, with * for a number (blocks.*.experts); empty: every
    module with num_experts, weights of one row per expert and
    forward(hidden_states, top_k_index, top_k_weights)."""
    imbalance: float = Field(default=1.0, ge=1)
    """What a rehearsal, which has no tokens, lets a rank be sent: so many times an even share of
    its group's. A run does not look at it."""


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
    ep: int = Field(default=1, gt=0)
    """Expert parallel: ranks that share the experts of each layer, inside dp_shard: it divides
    that."""
    tensor: Tensor = Tensor()
    """Details for tp."""
    pipeline: Pipeline = Pipeline()
    """Details for pp."""
    expert: Expert = Expert()
    """Details for ep."""
    sync_batch_norm: bool = False
    """Take batch norm's statistics over the micro-batches of all data-parallel ranks, instead of
    over each alone; on any device."""
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


class Scaler(Section):
    """torch.amp.GradScaler's settings, used when precision.dtype is fp16."""

    init_scale: float = Field(default=65536.0, gt=0)
    """First loss scale."""
    growth_factor: float = Field(default=2.0, gt=1)
    """Multiply the scale by this after `growth_interval` clean steps."""
    backoff_factor: float = Field(default=0.5, gt=0, lt=1)
    """Multiply the scale by this after a step with infinities."""
    growth_interval: int = Field(default=2000, gt=0)
    """Clean steps in a row before the scale grows."""
    max_skipped_steps: int = Field(default=20, gt=0)
    """So many steps in a row that were skipped, because their gradients were not finite, end the
    run. The first few of a run are normal: the scale is being found."""


class Precision(Section):
    """Number formats. Weights and optimizer state stay in fp32."""

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What the model computes in; bf16 and fp16 run under autocast."""
    tf32: bool | None = None
    """fp32 matrix products and convolutions on tensor cores that round to 10 bits: true: both (as
    torch.set_float32_matmul_precision("high") and torch.backends.cudnn.allow_tf32 do); false:
    neither; null: as the script has set them, which by torch's default is convolutions only. With
    reproducibility=bitwise null means false."""
    float8: Literal["none", "rowwise"] = "none"
    """Linear layers compute in 8 bits, with a scale for each row, by torchao; for tensor cores
    that can. Weights, gradients and optimizer state keep their format."""
    float8_skip: tuple[str, ...] = ("*head", "*output", "*classifier")
    """Patterns of layers that float8 leaves as they are."""
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
"""By name; other packages add theirs by an entry point. A sink's library may be heavy, so none is
imported before it is asked for."""
if TYPE_CHECKING:
    SinkName = str
else:
    SinkName = Literal[SINKS.names]


class MLflow(Section):
    """Where the sink mlflow writes."""

    tracking_uri: str | None = None
    """A server, or a store such as sqlite:///mlflow.db; null: MLFLOW_TRACKING_URI, or mlflow.db
    beside the run's directory."""
    experiment: str = "drivetrain"
    """The experiment's name; made when there is none."""
    run_id: str | None = None
    """An MLflow run that is open already: it is written to, and left open; null: one of its own."""


class Prometheus(Section):
    """How the sink prometheus is reached, on every node."""

    port: int = Field(default=9464, ge=0, le=65535)
    """Another is taken when it is not free; prometheus/ beside the run's directory says which."""
    host: str = "127.0.0.1"
    """The address to listen on: this machine's own, so that nobody else reads the metrics;
    0.0.0.0 for a Prometheus that comes from another."""


class Wandb(Section):
    """Where the sink wandb writes."""

    project: str = "drivetrain"
    """The project's name."""
    mode: Literal["offline", "online"] = "offline"
    """offline: into the run's directory, for `wandb sync`. online: to the server you are logged in
    at."""


class Record(Section):
    """What a run writes and shows."""

    logging_steps: int = Field(default=10, gt=0)
    """Metrics are reduced over ranks, written and shown each so many steps."""
    sinks: Literal["auto"] | tuple[SinkName, ...] = "auto"
    """Where scalars go besides the event files; auto: TensorBoard, if it is installed."""
    system_every_s: float | None = Field(default=10.0, gt=0)
    """CPU, memory, network and GPUs of each node go to the sinks each so many seconds, if psutil
    is installed; null: never."""
    price_per_device_hour: float | None = Field(default=None, ge=0)
    """What one rank's device costs an hour, in any currency: `drivetrain status` adds it up."""
    mlflow: MLflow = MLflow()
    """Details for the sink mlflow."""
    prometheus: Prometheus = Prometheus()
    """Details for the sink prometheus."""
    wandb: Wandb = Wandb()
    """Details for the sink wandb."""
    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    """The line rank 0 shows; auto: rich on a terminal, plain lines elsewhere."""
    log_ranks: Literal["first", "all"] = "first"
    """Whose lines of Python's `logging` reach the console. first: rank 0's, and of the others what
    is a warning or worse. all: every rank's, each labelled with its rank."""


class Sentinel(Section):
    """Are the copies of the model still copies?"""

    every_steps: int | None = Field(default=100, gt=0)
    """Compare the copies' weights, to the last bit, each so many steps, and stop when they differ;
    null: never. Only where there are copies: ddp, and fsdp with dp_replicate."""
    replay_every_steps: int | None = Field(default=None, gt=1)
    """Compute a micro-batch twice each so many steps, and stop when a rank's gradients are not the
    same bits: a processor that miscalculates; null: never."""


# The whole config: the keys of a run itself, and its sections.


class RunConfig(Section):
    """One run, from its first step to its last."""

    global_batch_size: int = Field(gt=0)
    """Samples per optimizer step over all ranks. Never changed by the number of ranks."""
    micro_batch_size: int | Literal["auto"] = "auto"
    """Samples that go through the model at once. auto: each rank's whole share of the batch."""
    max_steps: int | None = Field(default=None, gt=0)
    """Optimizer steps in the run; wins over num_train_epochs."""
    num_train_epochs: int | None = Field(default=None, gt=0)
    """Passes over the training data."""
    max_time_s: float | None = Field(default=None, gt=0)
    """Seconds of training, earlier attempts included, after which the run saves and is finished."""
    stop_at_step: int | None = Field(default=None, gt=0)
    """Stop after this step, evaluated and saved, although the run is longer: schedules go by its
    whole length. With a higher one, or none, the same command goes on to the bit."""
    seed: int = Field(default=42, ge=0, lt=2**63)
    """Sample order, initial weights and dropout all follow from it."""
    reproducibility: Literal["standard", "bitwise"] = "standard"
    """bitwise: the same weights, bit for bit, at any number of data-parallel ranks."""
    fault_tolerance: Literal["restart", "live"] = "restart"
    """restart: after a failure all ranks start again from the last checkpoint. live: ddp replicas
    go on without the lost one, which comes back by itself (`drivetrain train --live`)."""
    name: str | None = Field(default=None, coerce_numbers_to_str=True)
    """Name of the run; null: the time it started."""
    output_dir: Path = Path("runs")
    """Run directories are made here."""
    model: Model = Model()
    """Where the model's first weights come from."""
    optimization: Optimization = Optimization()
    """Learning rate, schedule, clipping."""
    precision: Precision = Precision()
    """Number formats."""
    parallel: Parallel = Parallel()
    """How the model is spread."""
    communication: Communication = Communication()
    """Gradient compression."""
    memory: Memory = Memory()
    """Recomputation."""
    compile: Compile = Compile()
    """torch.compile."""
    data: Data = Data()
    """Loading."""
    evaluation: Evaluation = Evaluation()
    """Validation."""
    early_stopping: EarlyStopping = EarlyStopping()
    """Ending early, by evaluations."""
    checkpoint: Checkpoint = Checkpoint()
    """Saving, and going on from what was saved."""
    record: Record = Record()
    """Events, sinks, progress."""
    sentinel: Sentinel = Sentinel()
    """Watching the copies of the model."""
