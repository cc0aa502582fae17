# Checks the variables that launch/node.sh and slurm/job.sh read; both scripts source this file. The variable label is
# the script's name in messages.

say() { echo "[$label] $*"; }
fail() {
    echo "[$label] error: $*" >&2
    exit 1
}

# whole NAME LEAST [MOST]: checks that the variable NAME is empty, or a whole number in these bounds.
whole() {
    local value=${!1:-} bounds="of at least $2"
    [[ -z ${3:-} ]] || bounds="from $2 to $3"
    [[ -n $value ]] || return 0
    # Bash reads a number with a leading 0 as octal, and longer numbers overflow.
    if [[ ! $value =~ ^(0|[1-9][0-9]{0,8})$ ]] || ((value < $2 || value > ${3:-999999999})); then
        fail "$1=$value: must be a whole number $bounds, without leading zeros"
    fi
}

# decimal NAME: checks that the variable NAME is empty, or a number of at least 0.
decimal() {
    local value=${!1:-}
    if [[ -n $value && ! $value =~ ^([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$ ]]; then
        fail "$1=$value: must be a number of at least 0, in GB/s"
    fi
}

check_numbers() {
    local name
    for name in NODES NNODES NPROC GPUS GRACE; do
        whole "$name" 1
    done
    whole NODE_RANK 0
    whole MASTER_PORT 1 65535
    whole PREFLIGHT 0 1
    decimal FLOOR_ALL_REDUCE
    decimal FLOOR_ALL_TO_ALL
}
