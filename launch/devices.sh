#!/usr/bin/env bash
# Prints how many processes a start takes here: one for each GPU that torch finds, which heeds CUDA_VISIBLE_DEVICES and
# the driver's age, else the number given.
#
#   ./launch/devices.sh WITHOUT_GPU
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[[ -z ${IN_CONTAINER:-} ]] || python=python3
ask='import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)'
gpus=$("$python" -c "$ask" 2>/dev/null) || gpus=0
if ((gpus == 0)) && [[ $(cat .venv/.spmdrl/side 2>/dev/null) == gpu ]]; then
    echo "[launch] this installation is for GPUs and torch finds none" \
        "(CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-unset}): look at nvidia-smi; going on with $1 on the CPU" >&2
fi
echo $((gpus > 0 ? gpus : $1))
