#!/bin/bash
#SBATCH --job-name=gpt
#SBATCH --nodes=4-8
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=96
#SBATCH --gpus-per-node=8
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --partition=gpu
#SBATCH --account=research
#SBATCH --qos=high
#SBATCH --constraint=a100&ib
#SBATCH --signal=USR1@135
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --chdir=/shared/code
#SBATCH --output=/shared/runs/digits/logs/slurm-%j.out
#SBATCH --mail-type=END

export NCCL_DEBUG=WARN
export NOTE='two words'

module load cuda

# Each start of the job has its own rendezvous.
rdzv_id=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}

# One supervisor per node: it starts the node's ranks and watches them.
srun \
    --kill-on-bad-exit=0 \
    --cpus-per-task=96 \
    --no-kill \
    --container-image=/images/train.sqsh \
    --container-mounts=/shared/code:/shared/code,/shared/runs/digits:/shared/runs/digits,/data:/data \
    --container-workdir=/shared/code \
    python -m drivetrain train \
        --nnodes=4:8 \
        --nproc-per-node=8 \
        --run-dir=/shared/runs/digits \
        --grace-period=120 \
        --stall-timeout=300 \
        --rdzv-id="$rdzv_id" \
        examples/gpt.py -- --title 'it'"'"'s mine' '$HOME'
code=$?

# 75: asked to stop, and saved. The same job resumes from there, unless it was cancelled meanwhile.
if [ $code -eq 75 ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID" 2> /dev/null || echo "saved; not requeued, as asked"
fi
exit $code
