#!/usr/bin/env bash
#SBATCH --job-name=gsm8k_8gpu
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@420
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out
# Trains Qwen2.5-0.5B-Instruct by GRPO on GSM8K, on one node of 8 GPUs.
#   sbatch slurm/gsm8k_8gpu.sh [FLAGS]      # FLAGS: those of spmdrl.train; docs/slurm.md lists the variables
# With one node there are no pairs to measure, so the preflight only runs the doctor.
set -euo pipefail
cd "${ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}" # SLURM runs a copy of this file from another folder
if [[ ! -x slurm/job.sh ]]; then
    echo "[job] error: no slurm/job.sh in $PWD: run sbatch in the project's folder, or set ROOT to that folder" >&2
    exit 1
fi
# GRACE: seconds for the last step and its save, less than in --signal. FLOOR_*: least GB/s between two nodes.
export NODES=${NODES:-1} GPUS=${GPUS:-8} RUN_DIR=${RUN_DIR:-runs/gsm8k_grpo} GRACE=${GRACE:-240}
export FLOOR_ALL_REDUCE=${FLOOR_ALL_REDUCE:-0} FLOOR_ALL_TO_ALL=${FLOOR_ALL_TO_ALL:-0}
exec slurm/job.sh configs/gsm8k_grpo.yaml "$@"
