#!/usr/bin/env bash
#SBATCH --job-name=dapo_671b
#SBATCH --nodes=66
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=3-00:00:00
#SBATCH --signal=B:USR1@2400
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out
# Trains DeepSeek-V3, 671B parameters, by DAPO on 512 GPUs of 80 GB: 64 nodes of 8 GPUs, and 2 spare nodes.
#   sbatch slurm/dapo_671b.sh [FLAGS]      # FLAGS: those of spmdrl.train; docs/slurm.md lists the variables
# A step takes many minutes. If sampling is not done within half of GRACE after the signal, the requeued job repeats it.
set -euo pipefail
cd "${ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}" # SLURM runs a copy of this file from another folder
if [[ ! -x slurm/job.sh ]]; then
    echo "[job] error: no slurm/job.sh in $PWD: run sbatch in the project's folder, or set ROOT to that folder" >&2
    exit 1
fi
# GRACE: seconds for the last step and its save, less than in --signal. FLOOR_*: least GB/s between two nodes.
export NODES=${NODES:-64} GPUS=${GPUS:-8} RUN_DIR=${RUN_DIR:-runs/dapo_671b} GRACE=${GRACE:-2100}
export FLOOR_ALL_REDUCE=${FLOOR_ALL_REDUCE:-100} FLOOR_ALL_TO_ALL=${FLOOR_ALL_TO_ALL:-20}
exec slurm/job.sh configs/dapo_671b.yaml "$@"
