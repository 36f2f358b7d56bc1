#!/usr/bin/env bash
# Start a script on this machine, or on each of several:
#
#   examples/launch.sh train.py 4                              four processes here
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 examples/launch.sh train.py 8    on the first of two machines
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=host0 examples/launch.sh train.py 8    on the second
#   sbatch --nodes=2 --ntasks-per-node=1 --wrap "srun examples/launch.sh train.py 8"     by Slurm
#
# Words after the number of processes go to the script. LAUNCHER=torchrun starts it with torchrun instead.
set -euo pipefail

script=${1:?"which script? examples/launch.sh SCRIPT [PROCESSES] [ARGS]"}
processes=${2:-1}
shift $(($# > 1 ? 2 : 1))

nodes=${NNODES:-${SLURM_NNODES:-1}}
flags=(--nnodes="$nodes" --nproc-per-node="$processes")
if [ "$nodes" -gt 1 ]; then
  # All nodes must name the same one; Slurm's first node does, where nobody has said another.
  first=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
  flags+=(--node-rank="${NODE_RANK:-${SLURM_NODEID:?"NODE_RANK is not set"}}" --master-addr="$first" --master-port="${MASTER_PORT:-29500}")
fi

# One thread each where nobody has said more: processes that all take all cores wait for each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if [ "${LAUNCHER:-drivetrain}" = torchrun ]; then
  [ "$nodes" -gt 1 ] || flags+=(--standalone)
  exec torchrun "${flags[@]}" "$script" "$@"
fi
exec drivetrain train "${flags[@]}" "$script" "$@"
