"""Checks the machine: shared memory, limits, leftover variables, its own name, the sandbox, the model hub."""

import os
import resource
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from spmdrl.tools.doctor_findings import Finding, fail, ok, warn
from spmdrl_sandbox.base import SandboxError
from spmdrl_sandbox.open import open_sandbox
from spmdrl_sandbox.warm import Warm

GIB = 1 << 30
SHM = GIB
"""Bytes of /dev/shm below which NCCL and vLLM may fail on several GPUs; Docker gives 64 MiB."""
FILES = 4096
"""Open files that a rank with an engine, a reward pool and connections to all others should be allowed."""
FEW_FILES = 256
OWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
"""Variables that torchrun sets for each rank."""


def shared_memory(several_gpus: bool, path: str = "/dev/shm", least: int = SHM) -> Finding:
    """Checks the size of shared memory. least: bytes wanted."""
    try:
        disk = os.statvfs(path)
    except OSError as error:
        return fail("shared memory", f"{path}: {error.strerror}", f"mount a tmpfs at {path}")
    total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    said = f"{path}: {free / GIB:.2f} of {total / GIB:.2f} GiB free"
    if free >= least:
        return ok("shared memory", said)
    fix = (
        f"start the container with --shm-size 16g or --ipc host, or `mount -o remount,size=16g {path}`; files that a "
        "killed job left there may be removed"
    )
    return (fail if several_gpus else warn)("shared memory", said, fix)


def limits(infiniband: bool | None = None, get=resource.getrlimit) -> list[Finding]:
    """Checks limits of the shell: open files, locked memory, core dumps. infiniband: None looks for it."""
    soft, hard = get(resource.RLIMIT_NOFILE)
    said, fix = f"ulimit -n {_limit(soft)}", "`ulimit -n 65536` before the start"
    if hard != resource.RLIM_INFINITY and hard < FILES:
        fix = "raise the hard limit (/etc/security/limits.conf, LimitNOFILE of the service that starts jobs)"
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        found = [fail("open files", said, fix)]
    elif soft != resource.RLIM_INFINITY and soft < FILES:
        found = [warn("open files", said, fix)]
    else:
        found = [ok("open files", said)]
    if infiniband is None:
        devices = Path("/sys/class/infiniband")
        infiniband = devices.is_dir() and any(devices.iterdir())
    soft, _ = get(resource.RLIMIT_MEMLOCK)
    said = f"ulimit -l {_limit(soft, 1024)}"
    if infiniband and soft != resource.RLIM_INFINITY:
        fix = "RDMA pins memory: `ulimit -l unlimited`, in /etc/security/limits.conf or SLURM's PropagateResourceLimits"
        found.append(warn("locked memory", said, fix))
    else:
        found.append(ok("locked memory", said + ("" if infiniband else ", no InfiniBand here")))
    soft, _ = get(resource.RLIMIT_CORE)
    said = f"ulimit -c {_limit(soft, 1024)}"
    if soft == resource.RLIM_INFINITY:
        found.append(warn("core dumps", f"{said}: a crash writes all memory of a rank to disk", "`ulimit -c 0`"))
    else:
        found.append(ok("core dumps", said))
    return found


def _limit(value: int, unit: int = 1) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value // unit)


def under_torchrun(environment: Mapping[str, str] = os.environ, parent: int | None = None) -> bool:
    """Returns whether torchrun started this process: its own environment lacks the variables that it sets for ranks."""
    if "TORCHELASTIC_RUN_ID" not in environment or not all(name in environment for name in OWN[:3]):
        return False
    try:
        above = Path(f"/proc/{parent or os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return True
    return not any(each.startswith(b"TORCHELASTIC_RUN_ID=") for each in above)


def leftovers(ranked: bool, environment: Mapping[str, str] = os.environ) -> Finding:
    """Looks for variables of another job in this shell, which torchrun or a single process would take for its own."""
    names = [] if ranked else [name for name in OWN if name in environment]
    names += [name for name in environment if name.startswith("PET_")]
    names += [] if ranked else [name for name in environment if name.startswith("TORCHELASTIC_")]
    if not names:
        return ok("torchrun", "no variables of another job in the environment")
    return warn("torchrun", f"set in this shell: {', '.join(sorted(names))}", f"`unset {' '.join(sorted(names))}`")


def threads(ranked: bool, gpus: int, environment: Mapping[str, str] = os.environ, cores: int = 0) -> Finding:
    """Checks the threads of a rank: torchrun gives one to each of several ranks."""
    cores = cores or len(os.sched_getaffinity(0))
    given, ranks = environment.get("OMP_NUM_THREADS", ""), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    ranks = ranks if ranked else max(1, gpus)
    if given == "1" and gpus and cores >= 2 * ranks:
        return warn(
            "threads",
            f"OMP_NUM_THREADS=1 with {cores} cores for {ranks} ranks: work on the host waits",
            f"`export OMP_NUM_THREADS={cores // ranks}`, or start with launch/node.sh",
        )
    return ok("threads", f"OMP_NUM_THREADS {given or 'not set'}, {cores} cores")


def own_name(resolve=socket.gethostbyname, name: str = "", environment: Mapping[str, str] = os.environ) -> Finding:
    """Checks the address of the machine's own name, to which gloo binds: 127.0.1.1 would part nodes from each other."""
    name = name or socket.gethostname()
    chosen = environment.get("GLOO_SOCKET_IFNAME", "")
    fix = (
        "on one machine it does no harm; on several start with launch/node.sh, or set GLOO_SOCKET_IFNAME and "
        "NCCL_SOCKET_IFNAME to the interface between them (`ip addr` lists them)"
    )
    try:
        address = resolve(name)
    except OSError as error:
        said = f"{name} has no address ({error.strerror or error})"
    else:
        said = f"{name} is {address}"
        if not address.startswith("127."):
            return ok("own name", said)
    return ok("own name", f"{said}; GLOO_SOCKET_IFNAME is {chosen}") if chosen else warn("own name", said, fix)


def sandbox(start: Callable[[], Warm] = open_sandbox) -> Finding:
    """Checks by a small program that a sandbox keeps in what runs there: no file, port or process is reached."""
    try:
        opened = start()
    except SandboxError as error:
        return warn("sandbox", error.why, error.fix or "needed by rewards that run code of a model alone")
    opened.close()
    return ok("sandbox", f"{opened.name} keeps programs in")


def hub_is_off(environment: Mapping[str, str]) -> bool:
    """Returns whether the hub's client is told to ask nothing."""
    return environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def hub(environment: Mapping[str, str] = os.environ, wait: float = 4.0) -> Finding:
    """Checks that the model hub answers, by one request without content. wait: seconds."""
    place = environment.get("HF_ENDPOINT") or "https://huggingface.co"
    if hub_is_off(environment):
        return ok("hub", "HF_HUB_OFFLINE is set: nothing is asked, models come from folders and the cache")
    try:
        with urllib.request.urlopen(urllib.request.Request(place, method="HEAD"), timeout=wait) as answer:
            return ok("hub", f"{place} answers ({answer.status})")
    except urllib.error.HTTPError as error:
        return ok("hub", f"{place} answers ({error.code})")
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        return warn(
            "hub", f"{place}: {why}", "give --model.path and --data.train as folders and files, with HF_HUB_OFFLINE=1"
        )
