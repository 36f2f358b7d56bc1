"""The rows: every class, argument, command and flag that the field's documents show.

They come from five documents: a page of drop-in trainers, a guide to strategies, an explanation
with code, a course outline, and a guide to building everything yourself. Where a document imports
its own package, the row imports `drivetrain`. Snippets are not copied: they use the same names and
values on small data.
"""

from __future__ import annotations

from tests.documents.row import Row

_DDP = "from drivetrain import PyTorchDDPTrainer\n"

QUICK_START = (
    Row(
        "cli-ddp",
        "python -m drivetrain.cli train --script train.py --num-gpus 4 --backend pytorch-ddp",
        "works",
        "the same as `drivetrain train train.py --nproc-per-node 4`",
        command="python -m drivetrain.cli train --script train.py --num-gpus 2 "
        "--backend pytorch-ddp",
    ),
    Row(
        "cli-horovod",
        "horovodrun -np 8 python -m drivetrain.cli train --script train.py --backend horovod",
        "not run",
        "needs Horovod; each process then becomes the script ([how](horovod.md#usage))",
        command="horovodrun -np 2 --gloo python -m drivetrain.cli train --script train.py "
        "--backend horovod",
        needs="horovod",
    ),
    Row(
        "cli-ray",
        "python -m drivetrain.cli train --script train.py --num-nodes 4 --gpus-per-node 8 "
        "--backend ray --address ray://head-node:10001",
        "works",
        "submits a job to the cluster ([Ray](ray.md)); `--dry-run` prints it",
        command="python -m drivetrain.cli train --script train.py --num-nodes 4 "
        "--gpus-per-node 8 --backend ray --address ray://head-node:10001 --dry-run",
    ),
    Row(
        "ddp",
        "PyTorchDDPTrainer(model=model, num_gpus=4, batch_size=32, epochs=100)"
        ".fit(train_loader, val_loader)",
        "works",
        "under plain `python` it starts its own ranks; under a launcher it uses the existing ones",
        code=_DDP + "PyTorchDDPTrainer(model=model, num_gpus=4, batch_size=32, epochs=100)"
        ".fit(train_loader, val_loader)",
    ),
)

TRAINERS = (
    Row(
        "ddp-settings",
        "PyTorchDDPTrainer(model=MyModel(), num_gpus=8, batch_size=256, epochs=50, "
        "learning_rate=0.001, mixed_precision=True)",
        "works",
        "fp16 with loss scaling, on CPUs too",
        code=_DDP + "trainer = PyTorchDDPTrainer(model=MyModel(), num_gpus=8, batch_size=256, "
        "epochs=50, learning_rate=0.001, mixed_precision=True)\n"
        "trainer.fit(train_loader, val_loader)",
    ),
    Row(
        "fit-mlflow",
        'trainer.fit(train_loader, val_loader, checkpoint_dir="./checkpoints", '
        'mlflow_experiment="distributed-training")',
        "works",
        "writes `checkpoints/weights.pt` and an MLflow run in that experiment",
        code=_DDP + "import pathlib, time\n"
        "trainer = PyTorchDDPTrainer(model=MyModel(), epochs=2)\n"
        'history = trainer.fit(train_loader, val_loader, checkpoint_dir="./checkpoints", '
        'mlflow_experiment="distributed-training")\n'
        'assert pathlib.Path("checkpoints/weights.pt").is_file()\n'
        "for _ in range(0 if rank else 600):  # a sink is not waited for\n"
        '    if pathlib.Path("runs/mlflow.db").is_file():\n'
        "        break\n"
        "    time.sleep(0.1)\n"
        'assert rank or pathlib.Path("runs/mlflow.db").is_file()',
        needs="mlflow",
    ),
    Row(
        "history",
        "history.total_time, history.best_accuracy",
        "works",
        code=_DDP + "history = PyTorchDDPTrainer(model).fit(train_loader, val_loader)\n"
        'print(f"{history.total_time:.2f}s {history.best_accuracy:.4f}")',
    ),
    Row(
        "horovod",
        "HorovodTrainer(model=model, optimizer=optimizer, loss_fn=loss_fn, "
        "verbose=(hvd.rank() == 0)).fit(train_loader, epochs=100)",
        "works",
        "needs Horovod ([how](horovod.md#usage))",
        shown_by="tests/ranks/test_horovod.py",
        needs="horovod",
    ),
    Row(
        "metric-average",
        'trainer.metric_average(accuracy, name="accuracy")',
        "works",
        "for your own metrics; evaluations are already exact over all ranks",
        needs="horovod",
        shown_by="tests/ranks/test_horovod.py",
    ),
    Row(
        "horovodrun-hosts",
        "horovodrun -np 16 -H node1:8,node2:8 python train.py",
        "not run",
        "needs two hosts with Horovod; tested on one host. Without Horovod: "
        "`drivetrain train --hosts hosts.txt train.py`",
    ),
    Row(
        "horovod-timeline",
        "HOROVOD_TIMELINE=timeline.json horovodrun …",
        "not run",
        "Horovod's own file; Drivetrain's, for any strategy: `drivetrain profile` "
        "([Horovod](horovod.md#timeline))",
    ),
    Row(
        "ray",
        "RayTrainer(model, config).fit(train_loader, val_loader), trainer.best_accuracy, "
        "in a function for tune.run",
        "works",
        "in a task or trial it trains in that process, unless `num_workers` asks for more; tested "
        "as a task",
        needs="ray",
        shown_by="tests/documents/test_documents.py",
    ),
    Row(
        "tune-run",
        'tune.run(train_fn, config={"lr": tune.loguniform(1e-4, 1e-2), …}, num_samples=20, '
        'resources_per_trial={"gpu": 1})',
        "not run",
        "Ray Tune's own; `analysis.best_config` needs `metric=` and `mode=` there. Drivetrain's: "
        "[`drivetrain tune`](tune.md)",
    ),
    Row(
        "tensorflow-trainer",
        "from drivetrain import TensorFlowDistributedTrainer",
        "works",
        "[takes the function that builds the model](tensorflow.md); `drivetrain train --backend "
        "tensorflow` starts, supervises and records its workers",
        needs="tensorflow",
        shown_by="tests/tensorflow/test_tensorflow.py",
    ),
    Row(
        "mirrored",
        "tf.distribute.MirroredStrategy(), model.fit(train_dataset, epochs=50)",
        "not run",
        "TensorFlow's own; `drivetrain train` supervises it like any script. With recording and "
        "resuming: [`TensorFlowDistributedTrainer`](tensorflow.md)",
    ),
)

CONFIG = (
    Row(
        "config",
        'DistributedConfig(num_gpus=8, num_nodes=2, gpus_per_node=4, backend="pytorch-ddp", '
        "batch_size=32, epochs=100, learning_rate=0.001, mixed_precision=True, "
        "gradient_accumulation_steps=4, gradient_clipping=1.0, find_unused_parameters=False, "
        'checkpoint_frequency=10, checkpoint_dir="./checkpoints", mlflow_tracking=True, '
        "tensorboard=True, log_every_n_steps=100)",
        "works",
        "`checkpoint_frequency` counts epochs",
        code="from drivetrain import DistributedConfig, PyTorchDDPTrainer\n"
        'config = DistributedConfig(num_gpus=8, num_nodes=2, gpus_per_node=4, backend="pytorch-ddp"'
        ", batch_size=32, epochs=100, learning_rate=0.001, mixed_precision=True, "
        "gradient_accumulation_steps=4, gradient_clipping=1.0, find_unused_parameters=False, "
        'checkpoint_frequency=10, checkpoint_dir="./checkpoints", mlflow_tracking=True, '
        "tensorboard=True, log_every_n_steps=100)\n"
        "history = PyTorchDDPTrainer(model, config).fit(train_loader, val_loader)\n"
        "assert len(history.steps) == 100",
        needs="mlflow",
    ),
    Row(
        "nccl",
        'DistributedConfig(communication_backend="nccl")',
        "refused",
        'communication_backend = nccl: needs CUDA devices, but there are none; use "auto", which '
        "uses gloo on the CPU",
        code="from drivetrain import DistributedConfig\n"
        'DistributedConfig(communication_backend="nccl")',
    ),
    Row(
        "gloo",
        'DistributedConfig(communication_backend="gloo")',
        "works",
        "on CPUs",
        code="from drivetrain import DistributedConfig\n"
        'DistributedConfig(communication_backend="gloo")',
    ),
    Row(
        "mpi",
        'DistributedConfig(communication_backend="mpi")',
        "refused",
        'communication_backend = mpi: this torch was built without MPI; use "auto": NCCL and gloo '
        "use the same network, and need no mpirun",
        code="from drivetrain import DistributedConfig\n"
        'DistributedConfig(communication_backend="mpi")',
    ),
    Row(
        "backend-horovod",
        'DistributedConfig(backend="horovod")',
        "works",
        "training with it needs Horovod",
        code='from drivetrain import DistributedConfig\nDistributedConfig(backend="horovod")',
    ),
    Row(
        "backend-ray",
        'DistributedConfig(backend="ray")',
        "works",
        "`fit` runs on Ray Train's workers",
        needs="ray",
        shown_by="tests/documents/test_documents.py",
    ),
    Row(
        "backend-tensorflow",
        'DistributedConfig(backend="tensorflow")',
        "refused",
        "backend = tensorflow: trains Keras models, but this trainer takes torch's; use "
        "pytorch-ddp",
        code='from drivetrain import DistributedConfig\nDistributedConfig(backend="tensorflow")',
    ),
)

ADVANCED = (
    Row(
        "scaler",
        "PyTorchDDPTrainer(model=model, mixed_precision=True, scaler_init_scale=2**16, "
        "scaler_growth_interval=2000)",
        "works",
        code=_DDP + "PyTorchDDPTrainer(model=model, mixed_precision=True, scaler_init_scale=2**16, "
        "scaler_growth_interval=2000).fit(train_loader)",
    ),
    Row(
        "accumulation",
        "PyTorchDDPTrainer(model=model, batch_size=32, gradient_accumulation_steps=8)",
        "works",
        "a step has 32 × 8 × number of ranks samples",
        code=_DDP
        + "PyTorchDDPTrainer(model=model, batch_size=32, gradient_accumulation_steps=8)\\\n"
        "    .fit(train_loader)",
    ),
    Row(
        "horovod-fp16",
        "HorovodTrainer(model=model, compression=hvd.Compression.fp16)",
        "works",
        'or "fp16"; without Horovod: `PyTorchDDPTrainer(model, compression="fp16")`',
        shown_by="tests/ranks/test_horovod.py",
        needs="horovod",
    ),
    Row(
        "deepspeed-own-config",
        "from deepspeed import DeepSpeedConfig; DeepSpeedConfig(zero_optimization={…})",
        "refused",
        "by DeepSpeed: its class takes a file or a dict, but no keywords. `from drivetrain import "
        "DeepSpeedConfig` accepts them",
        needs="deepspeed",
        shown_by="tests/documents/test_documents.py",
    ),
    Row(
        "deepspeed-config",
        'DeepSpeedConfig(zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}, '
        '"offload_param": {"device": "cpu"}}), PyTorchDDPTrainer(model=model, '
        "deepspeed_config=config)",
        "works",
        "with `from drivetrain import DeepSpeedConfig`; a dict or a file also works",
        code="from drivetrain import DeepSpeedConfig, PyTorchDDPTrainer\n"
        'config = DeepSpeedConfig(zero_optimization={"stage": 3, "offload_optimizer": '
        '{"device": "cpu"}, "offload_param": {"device": "cpu"}})\n'
        "PyTorchDDPTrainer(model=model, deepspeed_config=config).fit(train_loader, val_loader)",
        needs="deepspeed",
    ),
    Row(
        "zero-stage",
        "PyTorchDDPTrainer(model=large_model, num_gpus=4, zero_stage=3)",
        "works",
        code=_DDP
        + "PyTorchDDPTrainer(model=large_model, num_gpus=4, zero_stage=3).fit(train_loader)",
        needs="deepspeed",
    ),
    Row(
        "positional",
        "PyTorchDDPTrainer(model, num_gpus=8).fit(train_loader, val_loader)",
        "works",
        code=_DDP + "PyTorchDDPTrainer(model, num_gpus=8).fit(train_loader, val_loader)",
    ),
    Row(
        "tuner",
        "DistributedTuner(train_fn=train_function, search_space=search_space, num_gpus=32, "
        "trials_per_gpu=1).tune(num_samples=100)",
        "works",
        "`from drivetrain.compat import DistributedTuner` ([search](tune.md))",
        shown_by="tests/tune/test_ways_in.py",
    ),
)

WATCHING = (
    Row(
        "tensorboard-dir",
        'PyTorchDDPTrainer(model=model, tensorboard_dir="./runs", log_every_n_steps=10)',
        "works",
        "losses, metrics, learning rates, gradient norms and system metrics",
        code=_DDP + "import pathlib\n"
        'PyTorchDDPTrainer(model=model, tensorboard_dir="./runs", log_every_n_steps=10)'
        ".fit(train_loader, val_loader)\n"
        'assert rank or list(pathlib.Path("runs").glob("*/tensorboard/events*"))',
        needs="tensorboard",
    ),
    Row(
        "tensorboard",
        "tensorboard --logdir=./runs",
        "works",
        "TensorBoard's own command; it finds every run in the directory",
        needs="tensorboard",
        shown_by="tests/unit/test_record.py",
    ),
    Row(
        "mlflow-run",
        'with mlflow.start_run(run_name="distributed-training"): PyTorchDDPTrainer(model, '
        "mlflow_tracking=True).fit(train_loader, val_loader)",
        "works",
        "metrics and settings go to that run; so do `log_param` and `log_metric` after `fit`",
        code=_DDP + "import mlflow\n"
        'mlflow.set_tracking_uri(f"sqlite:///mlflow-{rank}.db")\n'
        'with mlflow.start_run(run_name="distributed-training") as run:\n'
        "    PyTorchDDPTrainer(model, mlflow_tracking=True).fit(train_loader, val_loader)\n"
        '    mlflow.log_param("num_gpus", 8)\n'
        '    mlflow.log_metric("speedup", 7.5)\n'
        "logged = mlflow.get_run(run.info.run_id)\n"
        'assert logged.info.status == "FINISHED"\n'
        'assert logged.data.params["num_gpus"] == "8"\n'
        'assert rank or "train/loss" in logged.data.metrics',
        needs="mlflow",
    ),
    Row(
        "profile",
        "with torch.profiler.profile(activities=[…], record_shapes=True) as prof: "
        "trainer.fit(train_loader, val_loader, max_steps=100); prof.key_averages().table("
        'sort_by="cuda_time_total")',
        "works",
        "torch's own; `drivetrain profile` shows it next to communication and data loading",
        code=_DDP + "from torch.profiler import ProfilerActivity, profile\n"
        "trainer = PyTorchDDPTrainer(model, epochs=100)\n"
        "with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:\n"
        "    trainer.fit(train_loader, val_loader, max_steps=100)\n"
        'assert prof.key_averages().table(sort_by="cpu_time_total")\n'
        'assert "aten::addmm" in {each.key for each in prof.key_averages()}',
    ),
)

PRACTICES = (
    Row(
        "scaled-rate",
        "PyTorchDDPTrainer(model=model, num_gpus=num_gpus, learning_rate=base_lr * (new_batch / "
        "base_batch) ** 0.5)",
        "works",
        'or `learning_rate_scaling="sqrt"` ("linear"), which scales by the number of ranks',
        code=_DDP + "a = PyTorchDDPTrainer(MyModel(), num_gpus=num_gpus, "
        "learning_rate=0.001 * num_gpus ** 0.5).fit(train_loader)\n"
        'b = PyTorchDDPTrainer(MyModel(), learning_rate=0.001, learning_rate_scaling="sqrt")'
        ".fit(train_loader)\n"
        "assert a.steps[-1].learning_rate == b.steps[-1].learning_rate",
    ),
    Row(
        "scheduler",
        "SequentialLR(optimizer, schedulers=[LinearLR(optimizer, start_factor=0.1, "
        "total_iters=warmup_epochs), CosineAnnealingLR(optimizer, T_max=…)], "
        "milestones=[warmup_epochs])",
        "works",
        "`PyTorchDDPTrainer(model, scheduler=scheduler)` steps it every epoch; "
        "`warmup_epochs=5` is shorter",
        code=_DDP
        + "from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR\n"
        "warmup = LinearLR(optimizer, start_factor=0.1, total_iters=5)\n"
        "main = CosineAnnealingLR(optimizer, T_max=95)\n"
        "scheduler = SequentialLR(optimizer, schedulers=[warmup, main], milestones=[5])\n"
        "trainer = PyTorchDDPTrainer(model, optimizer=optimizer, scheduler=scheduler, epochs=100)\n"
        "rates = [step.learning_rate for step in trainer.fit(train_loader).steps]\n"
        "assert abs(rates[0] - 1e-4) < 1e-9 and abs(rates[5] - 1e-3) < 1e-9, rates[:7]\n"
        "assert rates[-1] < 1e-5",
    ),
    Row(
        "accumulation-for-memory",
        "PyTorchDDPTrainer(model=model, batch_size=64, gradient_accumulation_steps=8, num_gpus=4)",
        "works",
        code=_DDP + "PyTorchDDPTrainer(model=model, batch_size=64, gradient_accumulation_steps=8, "
        "num_gpus=4).fit(train_loader)",
    ),
    Row(
        "resume",
        'PyTorchDDPTrainer(model=model, checkpoint_frequency=10, checkpoint_dir="./checkpoints", '
        "resume_from_checkpoint=True)",
        "works",
        "saves every 10 epochs; restores weights, optimizer, schedule, step, random state and data "
        "position",
        code=_DDP + 'given = {"checkpoint_frequency": 10, "checkpoint_dir": "./checkpoints"}\n'
        "for epochs, before in ((20, 0), (30, 20)):\n"
        "    trainer = PyTorchDDPTrainer(\n"
        "        MyModel(), epochs=epochs, resume_from_checkpoint=True, **given)\n"
        "    assert trainer.fit(train_loader).resumed_step == before",
    ),
    Row(
        "sampler",
        "DataLoader(dataset, batch_size=batch_size, sampler=DistributedSampler(dataset, "
        "num_replicas=num_gpus, rank=rank), num_workers=4, pin_memory=True)",
        "works",
        "Drivetrain replaces the sampler: each sample once per epoch, at any number of ranks",
        code=_DDP + "from torch.utils.data import DataLoader, DistributedSampler\n"
        "sampler = DistributedSampler(dataset, num_replicas=num_gpus, rank=rank)\n"
        "loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=1)\n"
        "assert PyTorchDDPTrainer(model).fit(loader).steps[0].num_samples == 64",
    ),
)

LAUNCHING = (
    Row(
        "torch-launch",
        "python -m torch.distributed.launch --nproc_per_node=8 --master_port=29500 train.py "
        "--num-epochs 100 --batch-size 32 --lr 0.001",
        "works",
        "torch's own, and the script finds its ranks; with supervision: `drivetrain train "
        "--nproc_per_node=8 train.py …`",
        command="python -m drivetrain train --nproc_per_node=2 --master_port=29511 own_loop.py "
        "--num-epochs 100 --batch-size 32 --lr 0.001",
    ),
    Row(
        "slurm-launch",
        "srun python -m torch.distributed.launch --nproc_per_node=8 --nnodes=4 "
        "--node_rank=$SLURM_NODEID --master_addr=$master_addr --master_port=29500 train.py",
        "works",
        "torch's own; `drivetrain train --on slurm --nodes 4 --gpus-per-node 8 --time 12:00:00 "
        "train.py` writes and submits the batch script",
        command="python -m drivetrain train --on slurm --nodes 4 --gpus-per-node 8 "
        "--time 12:00:00 train.py --dry-run",
    ),
    Row(
        "kubernetes-job",
        "kind: Job, parallelism: 4, nvidia.com/gpu: 8, restartPolicy: OnFailure",
        "works",
        "the printed Job gives its pods no ranks; `drivetrain train --on kubernetes --nodes 4 "
        "--gpus-per-node 8 --image NAME:TAG --claim runs` creates one that does",
        command="python -m drivetrain train --on kubernetes --nodes 4 --gpus-per-node 8 "
        "--image pytorch/pytorch:2.13.0 --claim runs --run-dir /runs/one train.py --dry-run",
    ),
)

GUIDE = (
    Row(
        "torchrun",
        "torchrun --nproc_per_node=4 ddp_mnist.py",
        "works",
        "torchrun itself, or the same flags after `drivetrain train`",
        command="python -m drivetrain train --nproc_per_node=2 own_loop.py",
    ),
    Row(
        "srun",
        "srun --gpus=4 --ntasks=4 python ddp_mnist.py",
        "works",
        "each task finds its rank ([Slurm](slurm.md))",
        shown_by="tests/unit/test_cluster.py",
    ),
    Row(
        "two-nodes",
        "torchrun --nnodes=2 --nproc_per_node=4 --node_rank=0 --master_addr=10.0.0.1 "
        "--master_port=29500 ddp_training.py",
        "works",
        "the same flags; a shared `--run-dir` needs no address",
        command="python -m drivetrain train --nnodes=1 --nproc_per_node=2 --node_rank=0 "
        "--master_addr=127.0.0.1 --master_port=29512 own_loop.py",
    ),
    Row(
        "deepspeed-launcher",
        "deepspeed --num_gpus=4 deepspeed_train.py --deepspeed_config zero2_config.json",
        "works",
        "`load_config` reads `--deepspeed_config`; also after `drivetrain train`",
        command="deepspeed --num_gpus=2 train.py --deepspeed_config zero2_config.json",
        needs="deepspeed",
    ),
    Row(
        "deepspeed-config-flag",
        "train.py --deepspeed_config zero3_config.json",
        "works",
        "same as `parallel.strategy=deepspeed parallel.deepspeed.config=zero3_config.json`",
        command="python -m drivetrain train --nproc-per-node 2 train.py "
        "--deepspeed_config zero3_config.json",
        needs="deepspeed",
    ),
    Row(
        "own-accumulation",
        "loss = model(batch) / accumulation_steps; every accumulation_steps batches "
        "optimizer.step()",
        "works",
        "unchanged; in a `prepare` loop, Drivetrain does the division "
        "([keep your loop](keep-your-loop.md))",
        command="python -m drivetrain train --nproc-per-node 2 own_loop.py --accumulate 2",
    ),
    Row(
        "own-amp",
        "with autocast(): loss = model(batch); scaler.scale(loss).backward(); "
        "scaler.step(optimizer); scaler.update()",
        "works",
        "unchanged (`torch.amp`; torch.cuda.amp is deprecated); in Drivetrain: "
        "`precision.dtype=fp16`",
        command="python -m drivetrain train --nproc-per-node 2 own_loop.py --amp",
    ),
    Row(
        "bucket",
        "DDP(model, bucket_cap_mb=25)",
        "works",
        "`parallel.ddp.bucket_cap_mb=25`",
        command="python -m drivetrain train --nproc-per-node 2 train.py "
        "parallel.ddp.bucket_cap_mb=25",
    ),
    Row(
        "fsdp-names",
        "FSDP FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, NO_SHARD",
        "works",
        '`PyTorchDDPTrainer(model, backend="pytorch-fsdp", sharding_strategy="FULL_SHARD")`; '
        "[as config keys](strategies.md#torchs-names)",
        code=_DDP + 'for name in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"):\n'
        '    PyTorchDDPTrainer(MyModel(), backend="pytorch-fsdp", sharding_strategy=name)'
        ".fit(train_loader)",
    ),
    Row(
        "nsys",
        "nsys profile --trace=cuda,nvtx,osrt torchrun --nproc_per_node=4 train.py",
        "not run",
        "needs a GPU; NVIDIA's own, wraps either launcher",
    ),
    Row(
        "device-count",
        "torch.cuda.device_count(), dist.is_nccl_available()",
        "works",
        "torch's own; `drivetrain env` and `drivetrain doctor` report both",
        command="python -m drivetrain env",
    ),
    Row(
        "env-by-hand",
        "MASTER_ADDR=localhost MASTER_PORT=29500 WORLD_SIZE=4 RANK=0 LOCAL_RANK=0",
        "works",
        "a process with these variables is that rank",
        shown_by="tests/unit/test_drop_in.py",
    ),
    Row(
        "nccl-variables",
        "NCCL_DEBUG, NCCL_IB_DISABLE, NCCL_SOCKET_IFNAME, NCCL_BUFFSIZE, …",
        "not run",
        "needs a GPU; NCCL's own variables, which reach every rank (on a target: `--env`)",
    ),
)

EXPLANATION = (
    Row(
        "own-ddp",
        "DistributedTrainer: DDP(model, device_ids=[rank]), train_step(data, target), a "
        "DistributedSampler, set_epoch",
        "works",
        "your own script; `prepare(model, optimizer, loader)` adds checkpoints and records",
        command="python -m drivetrain train --nproc-per-node 2 own_loop.py --num-epochs 2",
    ),
    Row(
        "collectives",
        "dist.all_reduce, dist.all_gather, dist.broadcast, dist.send, dist.recv",
        "works",
        "torch's own, between the launched ranks",
        command="python -m drivetrain train --nproc-per-node 2 own_loop.py --collectives",
    ),
    Row(
        "ring",
        "ring_allreduce with dist.send before dist.recv on every rank",
        "refused",
        "deadlocks once a message is larger than the network's buffer, because every rank waits in "
        "send; use `isend` or `dist.batch_isend_irecv`. Such a hang is ended and explained "
        "(`drivetrain diagnose`)",
        shown_by="tests/launch/test_plain_deadlock.py",
    ),
    Row(
        "compression",
        "GradientCompression(compression_ratio=0.1).compress_gradients(gradients)",
        "works",
        "also as a setting: `PyTorchDDPTrainer(model, compression=GradientCompression(0.1))`, "
        "which sends the rest later instead of dropping it",
        code="from drivetrain import GradientCompression, PyTorchDDPTrainer\n"
        "compression = GradientCompression(compression_ratio=0.1)\n"
        "given = [torch.arange(-10.0, 10.0), None]\n"
        "few = compression.compress_gradients(given)\n"
        "assert few[1] is None and int((few[0] != 0).sum()) == 2, few\n"
        "assert compression.decompress_gradients(few) is few\n"
        "PyTorchDDPTrainer(model, compression=compression).fit(train_loader)",
    ),
    Row(
        "overlap",
        "OverlappedTrainer: dist.all_reduce(param.grad, async_op=True) for each, then wait",
        "works",
        "unchanged; ddp and fsdp already overlap communication with backward",
        command="python -m drivetrain train --nproc-per-node 2 own_loop.py --overlap",
    ),
    Row(
        "monitor",
        'PerformanceMonitor().start_timer("step"), .end_timer("step"), '
        ".monitor_training(trainer, data_loader, num_steps=100)",
        "works",
        "takes a drop-in trainer, or any object with train_step(data, target)",
        code="from drivetrain import PerformanceMonitor, PyTorchDDPTrainer\n"
        "monitor = PerformanceMonitor()\n"
        'monitor.start_timer("step")\n'
        'assert monitor.end_timer("step") >= 0\n'
        "trainer = PyTorchDDPTrainer(model, epochs=100)\n"
        "monitor.monitor_training(trainer, train_loader, num_steps=100)\n"
        "assert len(trainer.history.steps) == 100",
    ),
    Row(
        "own-monitor",
        "profile_communication(): dist.all_reduce by size, time and bandwidth",
        "works",
        "unchanged; `drivetrain probe` measures a cluster's links",
        shown_by="tests/unit/test_probe_sizes.py",
    ),
    Row(
        "local-rank",
        'parser.add_argument("--local_rank", type=int, default=0)',
        "works",
        "ranks are set by environment variables; the flag keeps its default",
        command="python -m drivetrain train --nproc-per-node 2 own_loop.py",
    ),
)

NAMED = (
    Row(
        "sharded-checkpoints",
        "checkpointing strategies: full, sharded",
        "works",
        "each rank writes its shards; `weights.pt` or `weights/` at the end is complete "
        "([checkpoints](checkpoints.md))",
        shown_by="tests/unit/test_checkpoint.py",
    ),
    Row(
        "incremental-checkpoints",
        "checkpointing strategies: incremental",
        "works",
        "`checkpoint.incremental=true` writes only changed bytes "
        "([checkpoints](checkpoints.md#incremental-checkpoints)); frozen weights can be left "
        "out (`checkpoint.contents=trained`)",
        code="from drivetrain import Task, Trainer\n"
        "from drivetrain.checkpoint.locate import locate\n"
        "model.layers[0].requires_grad_(False)\n"
        "def loss(model, batch):\n"
        "    return loss_fn(model(batch[0]), batch[1])\n"
        'saving = {"every_steps": 2, "incremental": True}\n'
        'config = {"max_steps": 6, "global_batch_size": 16, "checkpoint": saving}\n'
        "trainer = Trainer(Task(lambda: model, loss), config)\n"
        "trainer.fit(dataset)\n"
        "kept = [e.manifest for e in locate(str(trainer.run_dir)).entries() if e.manifest]\n"
        "assert [m.step for m in kept] == [6, 4]\n"
        "weight = model.layers[0].weight.nbytes\n"
        "assert all(m.num_referred_bytes >= weight for m in kept), kept",
    ),
    Row(
        "elastic",
        "elastic training, adding and removing nodes",
        "works",
        "`--nnodes MIN:MAX`; the global batch size stays ([fault tolerance](fault-tolerance.md))",
        shown_by="tests/ray/test_ray.py",
    ),
    Row(
        "profilers",
        "PyTorch Profiler, py-spy",
        "works",
        "`drivetrain profile` runs torch's profiler on chosen ranks and steps, and py-spy with "
        "`--py-spy`",
        command="python -m drivetrain profile --ranks all --steps 3:5 --nproc-per-node 2 train.py",
    ),
    Row(
        "prometheus",
        "monitoring with Prometheus",
        "works",
        "`record.sinks=[prometheus]` ([observability](observability.md))",
        shown_by="tests/unit/test_sinks.py",
    ),
    Row(
        "population",
        "population-based training",
        "works",
        "`drivetrain tune --population 8` ([search](tune.md#population-based-training))",
        shown_by="tests/tune/test_forks.py",
    ),
    Row(
        "parameter-server",
        "a parameter server, asynchronous SGD",
        "works",
        "`parallel.strategy=parameter_server` ([parameter servers](parameter-server.md))",
        shown_by="tests/ranks/test_parameter_server.py",
    ),
    Row(
        "notebook",
        "notebook_launcher(train, args=(…), num_processes=2)",
        "works",
        "same as Accelerate's ([in a notebook](drop-in-trainers.md#in-a-notebook))",
        shown_by="tests/unit/test_drop_in.py",
    ),
)

DOCUMENTS: dict[str, tuple[Row, ...]] = {
    "Drop-in trainers: quick start": QUICK_START,
    "Trainers by framework": TRAINERS,
    "DistributedConfig": CONFIG,
    "Mixed precision, accumulation, compression, ZeRO, search": ADVANCED,
    "Monitoring": WATCHING,
    "Best practices": PRACTICES,
    "Launch scripts": LAUNCHING,
    "Guide to strategies": GUIDE,
    "Explanation with code": EXPLANATION,
    "Mentioned without a snippet": NAMED,
}
ROWS = tuple(row for rows in DOCUMENTS.values() for row in rows)
