#!/usr/bin/env bash
# Prints the number of processes to start here: one for each GPU that torch finds (subject to CUDA_VISIBLE_DEVICES and
# the driver's version), else WITHOUT_GPU.
#
#   ./launch/devices.sh WITHOUT_GPU
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[[ -z ${IN_CONTAINER:-} ]] || python=python3
count='import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)'
gpus=$("$python" -c "$count" 2>/dev/null) || gpus=0
if ((gpus == 0)) && [[ $(cat .venv/.spmdrl/side 2>/dev/null) == gpu ]]; then
    echo "[launch] this installation is for GPUs, but torch finds none" \
        "(CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-unset}): check nvidia-smi; starting $1 processes on the CPU" >&2
fi
echo $((gpus > 0 ? gpus : $1))
