# Defines how slurm/job.sh, which sources this file, starts processes, in the container CONTAINER or without one.
# on: srun with its flags. inside: the command that enters an apptainer container, or nothing. here: the command that
# starts a process on this node in the same way as the run. python: the interpreter on this node and in the container.
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
if [[ -n ${CONTAINER:-} && ! -v inside[0] ]]; then # only srun can enter a pyxis container
    here=("${on[@]}" --nodes=1 --ntasks=1)
fi
