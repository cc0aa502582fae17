#!/usr/bin/env bash
# One node of a run over several: reads SLURM's variables, or those given, and becomes torchrun.
#
#   srun --ntasks-per-node 1 ./launch/node.sh -m spmdrl.train --config configs/gsm8k_grpo.yaml
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node-a ./launch/node.sh -m spmdrl.train ...      # and NODE_RANK=1 on the other
#
# NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT: given, else SLURM's, else one node. NPROC: processes here, else one per GPU, else 1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
fail() { echo "[node] error: $*" >&2; exit 1; }
(($# > 0)) || fail "nothing to run: pass what torchrun should start, e.g. -m spmdrl.train --config configs/gsm8k_grpo.yaml"
[[ -x .venv/bin/torchrun ]] || fail "no .venv here: run ./launch/install.sh once (on a shared file system one node is enough)"

nodes=${NNODES:-${SLURM_NNODES:-1}}
node_rank=${NODE_RANK:-${SLURM_NODEID:-0}}
port=${MASTER_PORT:-$((20000 + ${SLURM_JOB_ID:-9500} % 20000))} # by job, so that two jobs on one node do not meet
address=${MASTER_ADDR:-}
if [[ -z $address && -n ${SLURM_JOB_NODELIST:-} ]]; then
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    address=${hosts%%$'\n'*}
fi
((nodes == 1)) || [[ -n $address ]] || fail "$nodes nodes but no MASTER_ADDR: give the name of the first node"
processes=${NPROC:-$(./launch/devices.sh 1)}
# torchrun would give each process one thread, and the work on the host (gradings, AdamW there, pushes) would wait for it.
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}

echo "[node] rank $node_rank of $nodes on $(hostname): $processes processes of $OMP_NUM_THREADS threads, meeting at ${address:-127.0.0.1}:$port"
exec .venv/bin/torchrun --nnodes "$nodes" --node-rank "$node_rank" --nproc-per-node "$processes" \
    --master-addr "${address:-127.0.0.1}" --master-port "$port" "$@"
