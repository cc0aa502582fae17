#!/usr/bin/env bash
# slurm/job.sh CONFIG [FLAGS]: checks settings and nodes, and starts one torchrun on each node by srun. After SIGUSR1
# the run saves and ends, and this script requeues the job. docs/slurm.md lists the variables.
set -euo pipefail
label=job
source launch/checks.sh
[[ -n ${SLURM_JOB_ID:-} ]] || fail 'not in SLURM: run sbatch slurm/NAME.sh, or HOSTS="a b" ./launch/node.sh without it'
(($# > 0)) || fail "no config is given: slurm/job.sh configs/gsm8k_grpo.yaml [FLAGS]"
signalled=0
trap 'signalled=1' USR1
# sbatch copies the environment of its caller, which may contain variables of another job.
unset HOSTS NODE_RANK NODE_NAME NODE_NAMES NNODES MASTER_ADDR MASTER_PORT IN_CONTAINER RANK LOCAL_RANK WORLD_SIZE \
    LOCAL_WORLD_SIZE GROUP_RANK "${!TORCHELASTIC_@}" "${!PET_@}"
check_numbers
NODES=${NODES:-${SLURM_NNODES:-1}} GPUS=${GPUS:-8} RUN_DIR=${RUN_DIR:-runs/$(basename "$1" .yaml)} GRACE=${GRACE:-240}
export GRACE MASTER_PORT=$((20000 + SLURM_JOB_ID % 11000)) # differs between jobs that share a node
case " ${*//_/-} " in
    *" --run.dir"*) fail "--run.dir: the scripts need it too; set RUN_DIR before sbatch" ;;
    *" --run.grace"*) fail "--run.grace: torchrun needs it too; set GRACE before sbatch" ;;
esac
source slurm/container.sh
words=(--config "$1" --run.dir "$RUN_DIR" --run.grace "$GRACE" "${@:2}")
if [[ " $* " == *" --dry-run "* ]]; then # one process plans the job for all ranks
    exec "${on[@]}" --nodes=1 --ntasks=1 "${inside[@]}" env WORLD_SIZE=$((NODES * ${NPROC:-$GPUS})) RANK=0 \
        "$python" -m spmdrl.train "${words[@]}"
fi

# SLURM sends SIGUSR1 before the time limit; if the limit is hardly longer, the job would save and requeue forever.
if [[ $(scontrol show job "$SLURM_JOB_ID") =~ TimeLimit=(([0-9]+)-)?([0-9]+):([0-9]+):([0-9]+) ]]; then
    minutes=$((10#0${BASH_REMATCH[2]} * 1440 + 10#${BASH_REMATCH[3]} * 60 + 10#${BASH_REMATCH[4]}))
    least=$((20 + GRACE / 60))
    ((minutes >= least)) ||
        fail "a time limit of $minutes min is too short for GRACE=$GRACE s: give sbatch --time at least $least min"
fi
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
((${#hosts[@]} >= NODES)) ||
    fail "NODES=$NODES, but SLURM allotted ${#hosts[@]}: give sbatch --nodes=$NODES, or more for spares"
# Settings are checked before the preflight, because the preflight takes longer.
ranks=$((NODES * ${NPROC:-${SLURM_GPUS_ON_NODE:-$GPUS}}))
check='from spmdrl.config.load import load_or_exit; load_or_exit()'
"${here[@]}" env WORLD_SIZE=$ranks RANK=0 "$python" -c "$check" "${words[@]}" || exit $?
mkdir -p "$RUN_DIR/logs"
start=$((${SLURM_RESTART_COUNT:-0} + 1))
say "job $SLURM_JOB_ID, start $start: ${#hosts[@]} nodes, $NODES needed; run folder $RUN_DIR"
chosen="${hosts[*]:0:NODES}"
if [[ ${PREFLIGHT:-1} != 0 ]]; then
    chosen=$("$python" -m spmdrl.tools.preflight --hosts "${hosts[*]}" --need "$NODES" \
        --folder "$RUN_DIR/logs/preflight" --port "$MASTER_PORT" \
        --floors "${FLOOR_ALL_REDUCE:-0},${FLOOR_ALL_TO_ALL:-0}" --srun "${on[*]@Q}" --inside "${inside[*]@Q}") ||
        fail "the preflight found too few good nodes"
fi
((!signalled)) || fail "SIGUSR1 arrived before the start"
export NODE_NAMES=$chosen
say "nodes: $chosen"

before=$(cat "$RUN_DIR/PREEMPTED" 2>/dev/null || true)
# SLURM must not kill tasks when one fails: the other ranks end within seconds and print the cause in their last line.
"${on[@]}" --nodes="$NODES" --ntasks="$NODES" --nodelist="${chosen// /,}" --kill-on-bad-exit=0 --wait=60 \
    "${inside[@]}" ./launch/node.sh -m spmdrl.train "${words[@]}" &
step=$!
trap 'signalled=1; kill -USR1 "$step" 2>/dev/null || true' USR1
trap 'signalled=1; kill -TERM "$step" 2>/dev/null || true' TERM
((!signalled)) || kill -USR1 "$step"
while :; do # a signal interrupts `wait`, but the step continues
    signalled=0 rc=0
    wait "$step" || rc=$?
    ((signalled)) || break
done
after=$(cat "$RUN_DIR/PREEMPTED" 2>/dev/null || true)
# torchrun's exit code does not distinguish a save from a failure; a changed file PREEMPTED means a save.
if [[ $after != "$before" && $after == *'"SIGUSR1"'* ]]; then
    at=$(grep -o '"step": [0-9]*' <<<"$after")
    [[ $at != "$(cat "$RUN_DIR/logs/requeued" 2>/dev/null)" ]] ||
        fail "saved at ${at}, like the start before: the time limit is too short for a step"
    echo "$at" >"$RUN_DIR/logs/requeued"
    say "saved at ${at}: requeueing the job"
    scontrol requeue "$SLURM_JOB_ID" || fail "SLURM cannot requeue the job; run sbatch again to continue from there"
fi
exit "$rc"
