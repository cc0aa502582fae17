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
# Qwen3-235B-A22B by GRPO on 32 GPUs of 96 GB or more: 4 nodes of 8, and 1 spare.
#   sbatch slurm/grpo_qwen3_235b.sh [FLAGS]      # flags as of spmdrl.train; docs/slurm.md lists the variables
# A step that still samples half of GRACE after the signal is sampled again after the requeue.
set -euo pipefail
cd "${ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}" # SLURM runs a copy of this file that lies elsewhere
if [[ ! -x slurm/job.sh ]]; then
    echo "[job] error: no slurm/job.sh in $PWD: sbatch from the project's folder, or set ROOT to it" >&2
    exit 1
fi
# GRACE: seconds for the last step and its save, below those of --signal. Floors: GB/s between two nodes.
export NODES=${NODES:-4} GPUS=${GPUS:-8} RUN_DIR=${RUN_DIR:-runs/qwen3_235b} GRACE=${GRACE:-1200}
export FLOOR_ALL_REDUCE=${FLOOR_ALL_REDUCE:-100} FLOOR_ALL_TO_ALL=${FLOOR_ALL_TO_ALL:-20}
exec slurm/job.sh configs/qwen3_235b.yaml "$@"
