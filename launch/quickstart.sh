#!/usr/bin/env bash
# Installs the project (the first time this takes minutes) and runs the main example: SmolLM2-135M learns one-digit
# addition by GRPO, with vLLM as the engine.
#
#   ./launch/quickstart.sh [flags of spmdrl.train, e.g. --run.steps 10]
#
# Starts one process per GPU, or two on a CPU; NPROC=... sets another number.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./launch/install.sh
processes=${NPROC:-$(./launch/devices.sh 2)}
exec .venv/bin/torchrun --standalone --nproc-per-node "$processes" \
    -m spmdrl.train --config configs/smollm2_addition.yaml "$@"
