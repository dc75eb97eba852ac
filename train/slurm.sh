#!/usr/bin/env bash
# Train on several nodes under Slurm, one launcher a node:
#   sbatch --nodes 2 --gpus-per-node 8 train/slurm.sh configs/smollm2-135m-dspark.yaml [section.key=value …]
# LAUNCH=configs/accelerate/zero2.yaml (the default), zero3.yaml, fsdp2.yaml or ddp.yaml.
# Everything the run reads and writes must be on a disk that all nodes see.
#SBATCH --job-name=dspark-train
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=SIGTERM@300      # five minutes before the limit: save, and stop at the next step
set -euo pipefail

if [[ $# -lt 1 || -z ${SLURM_JOB_NODELIST:-} ]]; then
  echo "usage: sbatch --nodes N --gpus-per-node G $0 CONFIG [section.key=value …]" >&2
  exit 2
fi
config=$1
shift

nodes=$SLURM_JOB_NUM_NODES
gpus=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
if [[ ! $gpus =~ ^[1-9][0-9]*$ ]]; then
  echo "error: the GPUs of a node are not known: pass --gpus-per-node, or set GPUS_PER_NODE" >&2
  exit 2
fi

# The first node is where the processes meet. The port follows from the job, so that two jobs that
# share a node do not meet.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts[0]}
MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
export MASTER_ADDR MASTER_PORT

launch=${LAUNCH:-configs/accelerate/zero2.yaml}
echo "$((nodes * gpus)) processes on $nodes nodes, $launch, meeting at $MASTER_ADDR:$MASTER_PORT" >&2

# SLURM_NODEID differs from node to node: the shell that srun starts there reads it, not this one.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 bash -c '
  exec accelerate launch \
    --config_file "$1" \
    --num_machines "$2" \
    --num_processes "$3" \
    --machine_rank "$SLURM_NODEID" \
    --main_process_ip "$MASTER_ADDR" \
    --main_process_port "$MASTER_PORT" \
    train.py --config "${@:4}"
' launch "$launch" "$nodes" "$((nodes * gpus))" "$config" "train.num_processes=$((nodes * gpus))" "$@"
