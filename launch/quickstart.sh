#!/usr/bin/env bash
# Installs (first time: minutes) and runs the main job: SmolLM2-135M learns one-digit addition by GRPO, sampled by vLLM.
#
#   ./launch/quickstart.sh [flags of spmdrl.train, e.g. --run.steps 10]
#
# One process per GPU, or two on a CPU; NPROC=... overrides.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./launch/install.sh
processes=${NPROC:-$(./launch/devices.sh 2)}
exec .venv/bin/torchrun --standalone --nproc-per-node "$processes" \
    -m spmdrl.train --config configs/smollm2_addition.yaml "$@"
