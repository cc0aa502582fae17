#!/usr/bin/env bash
# Starts torchrun on one node of a run on several nodes, configured by the variables below or by SLURM's variables.
#
#   HOSTS="node-a node-b" ./launch/node.sh -m spmdrl.train ...      # starts all nodes by ssh
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node-a ./launch/node.sh -m spmdrl.train ...      # and NODE_RANK=1 on node-b
#   srun --ntasks-per-node 1 ./launch/node.sh -m spmdrl.train ...      # slurm/job.sh also checks and requeues
#
# NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT describe the run; by default, SLURM's values or one node. NPROC is the
# number of processes on this node; by default, one per GPU, or 1. GRACE is the time in seconds for a save after
# SIGUSR1, as in --run.grace. PREFLIGHT=0 skips the check of hosts. docs/slurm.md describes all variables.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
label=node
source launch/checks.sh
if (($# == 0)); then
    fail "nothing to run: pass what torchrun should start, e.g. -m spmdrl.train --config configs/gsm8k_grpo.yaml"
fi
check_numbers
python=.venv/bin/python torchrun=.venv/bin/torchrun
if [[ -n ${IN_CONTAINER:-} ]]; then # the image contains the packages, so .venv is not used
    torchrun=$(command -v torchrun) || fail "the container has no torchrun on PATH"
    python=python3
    export PYTHONPATH=$PWD:$PWD/kernels:$PWD/sandbox${PYTHONPATH:+:$PYTHONPATH}
fi
if [[ ! -x $torchrun ]]; then
    fail "no .venv in $PWD: run ./launch/install.sh once (on a shared file system, on one node)"
fi
# Removes the variables of an outer job, which torchrun sets for its ranks, and PET_*, which torchrun reads as flags.
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME \
    "${!TORCHELASTIC_@}" "${!PET_@}"

name=${NODE_NAME:-${SLURMD_NODENAME:-$(hostname)}}
if [[ $1 == doctor ]]; then
    shift
    unset NODE_RANK MASTER_ADDR
    exec "$python" -m spmdrl.tools.doctor --node "$name" "$@"
fi
if [[ -n ${HOSTS:-} && -z ${NODE_RANK:-}${NODE_NAMES:-} ]]; then # NODE_NAMES: ssh_start started this
    exec "$python" -m spmdrl.tools.ssh_start "$@"
fi
nodes=${NNODES:-${SLURM_NNODES:-1}}
node_rank=${NODE_RANK:-${SLURM_NODEID:-0}}
port=${MASTER_PORT:-$((20000 + ${SLURM_JOB_ID:-9500} % 11000))} # differs between jobs that share a node
address=${MASTER_ADDR:-}
if [[ -n ${NODE_NAMES:-} ]]; then # the rank is the position in this list of chosen nodes
    read -ra names <<<"$NODE_NAMES"
    nodes=${#names[@]} address=${names[0]} node_rank=""
    for i in "${!names[@]}"; do
        [[ ${names[i]} != "$name" ]] || node_rank=$i
    done
    [[ -n $node_rank ]] || fail "this node is $name, which is not in NODE_NAMES=$NODE_NAMES"
elif [[ -z $address && -n ${SLURM_JOB_NODELIST:-} ]]; then
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    address=${hosts%%$'\n'*}
fi
((node_rank < nodes)) || fail "NODE_RANK=$node_rank: must be below NNODES=$nodes, because the first node has rank 0"
((nodes == 1)) || [[ -n $address ]] || fail "$nodes nodes but no MASTER_ADDR: give the name of the first node"
processes=${NPROC:-$(./launch/devices.sh 1)}
# By default torchrun gives each process one thread, which slows work on the host (grading, AdamW, pushes).
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}
if ((nodes > 1)); then
    # By default gloo binds to the address of the host's own name, which may be 127.0.1.1 in /etc/hosts.
    way=$("$python" -m spmdrl.tools.reach "$address" "$port")
    if [[ -n $way ]]; then
        export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$way} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$way}
    fi
fi

say "rank $node_rank of $nodes on $name ($(hostname)): $processes processes of $OMP_NUM_THREADS threads," \
    "master ${address:-127.0.0.1}:$port, network ${GLOO_SOCKET_IFNAME:-chosen by the libraries}"
# Unless SIGUSR1 is in this list, it ends torchrun without its ranks. The timeout lets ranks save; its default is 30 s.
exec "$torchrun" --nnodes "$nodes" --node-rank "$node_rank" --nproc-per-node "$processes" \
    --master-addr "${address:-127.0.0.1}" --master-port "$port" \
    --signals-to-handle=SIGTERM,SIGINT,SIGUSR1 --shutdown-timeout $((${GRACE:-60} + 60)) "$@"
