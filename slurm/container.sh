# How slurm/job.sh starts a process, in the container that CONTAINER names or without one; it sources this file.
# on: srun with its flags. inside: what enters a container of apptainer's. here: a process on this node that sees what
# the run will see. python: the interpreter of the batch host.
python=.venv/bin/python inside=() on=(srun --ntasks-per-node=1 --cpu-bind=none --overlap --export=ALL)
if [[ -n ${CONTAINER:-} ]]; then
    export IN_CONTAINER=1
    python=python3
    if [[ $CONTAINER == *.sif ]]; then
        read -ra inside <<<"apptainer exec ${APPTAINER_FLAGS:---nv} --bind $PWD${MOUNTS:+,$MOUNTS} --pwd $PWD"
        inside+=("$CONTAINER")
    else
        on+=(--container-image="$CONTAINER" --container-mounts="$PWD:$PWD${MOUNTS:+,$MOUNTS}")
        on+=(--container-workdir="$PWD")
    fi
fi
here=("${inside[@]}")
if [[ -n ${CONTAINER:-} && ! -v inside[0] ]]; then # pyxis has no other way in than srun
    here=("${on[@]}" --nodes=1 --ntasks=1)
fi
