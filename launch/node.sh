#!/usr/bin/env bash
# Starts torchrun on one node of a run on several nodes, from the variables below or SLURM's.
#
#   HOSTS="node-a node-b" ./launch/node.sh -m spmdrl.train ...      # starts all of them, by ssh
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node-a ./launch/node.sh -m spmdrl.train ...      # and NODE_RANK=1 on the other
#   srun --ntasks-per-node 1 ./launch/node.sh -m spmdrl.train ...      # slurm/job.sh does more
#
# NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT: by default SLURM's, else one node. NPROC: processes here, by default one
# per GPU, else 1. GRACE: seconds for the save after SIGUSR1, as --run.grace. PREFLIGHT=0: skips the check of hosts.
# docs/slurm.md has the rest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
label=node
source launch/checks.sh
if (($# == 0)); then
    fail "nothing to run: pass what torchrun should start, e.g. -m spmdrl.train --config configs/gsm8k_grpo.yaml"
fi
check_numbers
python=.venv/bin/python torchrun=.venv/bin/torchrun
if [[ -n ${IN_CONTAINER:-} ]]; then # the image brings what .venv holds elsewhere
    torchrun=$(command -v torchrun) || fail "the container has no torchrun on PATH"
    python=python3
    export PYTHONPATH=$PWD:$PWD/kernels:$PWD/sandbox${PYTHONPATH:+:$PYTHONPATH}
fi
if [[ ! -x $torchrun ]]; then
    fail "no .venv here: run ./launch/install.sh once (on a shared file system one node is enough)"
fi
# Removes variables of an outer job: torchrun sets these for its ranks, and reads PET_* as flags.
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME \
    "${!TORCHELASTIC_@}" "${!PET_@}"

name=${NODE_NAME:-${SLURMD_NODENAME:-$(hostname)}}
if [[ $1 == doctor ]]; then
    shift
    unset NODE_RANK MASTER_ADDR
    exec "$python" -m spmdrl.tools.doctor --node "$name" "$@"
fi
if [[ -n ${HOSTS:-} && -z ${NODE_RANK:-}${NODE_NAMES:-} ]]; then # hosts started from here start no others
    exec "$python" -m spmdrl.tools.ssh_start "$@"
fi
nodes=${NNODES:-${SLURM_NNODES:-1}}
node_rank=${NODE_RANK:-${SLURM_NODEID:-0}}
port=${MASTER_PORT:-$((20000 + ${SLURM_JOB_ID:-9500} % 11000))} # by job, so that two jobs on one node do not meet
address=${MASTER_ADDR:-}
if [[ -n ${NODE_NAMES:-} ]]; then # the position in this list of chosen nodes is the rank, in any order of starts
    read -ra names <<<"$NODE_NAMES"
    nodes=${#names[@]} address=${names[0]} node_rank=""
    for i in "${!names[@]}"; do
        [[ ${names[i]} != "$name" ]] || node_rank=$i
    done
    [[ -n $node_rank ]] || fail "this is $name, which is none of $NODE_NAMES"
elif [[ -z $address && -n ${SLURM_JOB_NODELIST:-} ]]; then
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    address=${hosts%%$'\n'*}
fi
((node_rank < nodes)) || fail "NODE_RANK=$node_rank: must be below NNODES=$nodes, as the first node is 0"
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
    "meeting at ${address:-127.0.0.1}:$port, network ${GLOO_SOCKET_IFNAME:-chosen by the libraries}"
# SIGUSR1 would end torchrun without its ranks unless it is in this list. The ranks get the time of a save, not 30 s.
exec "$torchrun" --nnodes "$nodes" --node-rank "$node_rank" --nproc-per-node "$processes" \
    --master-addr "${address:-127.0.0.1}" --master-port "$port" \
    --signals-to-handle=SIGTERM,SIGINT,SIGUSR1 --shutdown-timeout $((${GRACE:-60} + 60)) "$@"
