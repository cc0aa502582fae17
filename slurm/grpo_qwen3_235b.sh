#!/usr/bin/env bash
#SBATCH --job-name=grpo_qwen3_235b
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=2-00:00:00
#SBATCH --signal=B:USR1@1500
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out
# Trains Qwen3-235B-A22B by GRPO on 32 GPUs of 96 GB or more: 4 nodes of 8 GPUs, and 1 spare node.
#   sbatch slurm/grpo_qwen3_235b.sh [FLAGS]      # FLAGS: those of spmdrl.train; docs/slurm.md lists the variables
# If sampling of a step is not done within half of GRACE after the signal, the requeued job repeats it.
set -euo pipefail
cd "${ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}" # SLURM runs a copy of this file from another folder
if [[ ! -x slurm/job.sh ]]; then
    echo "[job] error: no slurm/job.sh in $PWD: run sbatch in the project's folder, or set ROOT to that folder" >&2
    exit 1
fi
# GRACE: seconds for the last step and its save, less than in --signal. FLOOR_*: least GB/s between two nodes.
export NODES=${NODES:-4} GPUS=${GPUS:-8} RUN_DIR=${RUN_DIR:-runs/qwen3_235b} GRACE=${GRACE:-1200}
export FLOOR_ALL_REDUCE=${FLOOR_ALL_REDUCE:-100} FLOOR_ALL_TO_ALL=${FLOOR_ALL_TO_ALL:-20}
exec slurm/job.sh configs/qwen3_235b.yaml "$@"
