#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --signal=USR1@45
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --chdir=/shared/code
#SBATCH --output=/shared/runs/digits/logs/slurm-%j.out

# Each start of the job has its own rendezvous.
rdzv_id=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}

# One supervisor per node: it starts the node's ranks and watches them.
srun \
    --kill-on-bad-exit=0 \
    /shared/venv/bin/python -m drivetrain train \
        --nnodes=2 \
        --nproc-per-node=2 \
        --run-dir=/shared/runs/digits \
        --grace-period=30 \
        --rdzv-id="$rdzv_id" \
        examples/digits.py max_steps=40
code=$?

# 75: asked to stop, and saved. The same job resumes from there, unless it was cancelled meanwhile.
if [ $code -eq 75 ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID" 2> /dev/null || echo "saved; not requeued, as asked"
fi
exit $code
