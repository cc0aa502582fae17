"""Checks the machine: shared memory, limits, leftover variables, the host name, the sandbox, the hub, the disk."""

import errno
import fcntl
import multiprocessing
import os
import resource
import secrets
import shutil
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from spmdrl.tools.doctor_findings import FAIL, OK, WARN, Finding, either, fail, ok, warn
from spmdrl_sandbox.base import SandboxError
from spmdrl_sandbox.open import open_sandbox
from spmdrl_sandbox.warm import Warm

MIB, GIB = 1 << 20, 1 << 30
FILES = 4096
"""Open-file limit that a rank needs for its engine, its reward pool and its connections to all other ranks."""
FEW_FILES = 256
OWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
"""Variables that torchrun sets for each rank."""
SLOW = 100.0
"""Minimum write speed in MB/s. On a slower disk, checkpointing a large model takes many minutes."""
LITTLE = 20 * GIB
"""Minimum free disk space in bytes. With less space, the next checkpoints might not fit."""


def shared_memory(several_gpus: bool, path: str = "/dev/shm", least: int = GIB) -> Finding:
    """Check that enough shared memory is free.

    several_gpus: True to report too little memory as a failure instead of a warning. least: minimum number of free
    bytes. With less, NCCL and vLLM can fail on several GPUs. Docker's default size is 64 MiB.
    """
    try:
        disk = os.statvfs(path)
    except OSError as error:
        return fail("shared memory", f"{path}: {error.strerror}", f"mount a tmpfs at {path}")
    total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    state = f"{path}: {free / GIB:.2f} of {total / GIB:.2f} GiB free"
    if free >= least:
        return ok("shared memory", state)
    fix = (
        f"start the container with --shm-size 16g or --ipc host, or `mount -o remount,size=16g {path}`; files that a "
        "killed job left there may be deleted"
    )
    return (fail if several_gpus else warn)("shared memory", state, fix)


def limits(infiniband: bool | None = None, get=resource.getrlimit) -> list[Finding]:
    """Check the limits on open files, locked memory and core dumps. infiniband: None to detect InfiniBand devices."""
    soft, hard = get(resource.RLIMIT_NOFILE)
    fix = "`ulimit -n 65536` before the start"
    if hard != resource.RLIM_INFINITY and hard < FILES:
        fix = "raise the hard limit (/etc/security/limits.conf, LimitNOFILE of the service that starts jobs)"
    enough = soft == resource.RLIM_INFINITY or soft >= FILES
    level = OK if enough else WARN if soft >= FEW_FILES else FAIL
    found = [Finding("open files", level, f"ulimit -n {_limit(soft)}", "" if enough else fix)]
    if infiniband is None:
        devices = Path("/sys/class/infiniband")
        infiniband = devices.is_dir() and any(devices.iterdir())
    soft, _ = get(resource.RLIMIT_MEMLOCK)
    state = f"ulimit -l {_limit(soft, 1024)}"
    if infiniband and soft != resource.RLIM_INFINITY:
        fix = "RDMA pins memory: `ulimit -l unlimited`, in /etc/security/limits.conf or SLURM's PropagateResourceLimits"
        found.append(warn("locked memory", state, fix))
    else:
        found.append(ok("locked memory", state + ("" if infiniband else ", no InfiniBand here")))
    soft, _ = get(resource.RLIMIT_CORE)
    state = f"ulimit -c {_limit(soft, 1024)}"
    if soft == resource.RLIM_INFINITY:
        found.append(warn("core dumps", f"{state}: a crash writes all memory of a rank to disk", "`ulimit -c 0`"))
    else:
        found.append(ok("core dumps", state))
    return found


def _limit(value: int, unit: int = 1) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value // unit)


def under_torchrun(environment: Mapping[str, str] = os.environ, parent: int | None = None) -> bool:
    """Return True if torchrun started this process: it has torchrun's variables, and its parent process lacks them."""
    if "TORCHELASTIC_RUN_ID" not in environment or not all(name in environment for name in OWN[:3]):
        return False
    try:
        above = Path(f"/proc/{parent or os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return True
    return not any(each.startswith(b"TORCHELASTIC_RUN_ID=") for each in above)


def leftovers(ranked: bool, environment: Mapping[str, str] = os.environ) -> Finding:
    """Check that no variables of another job are set, since torchrun or a single process would pick them up.

    ranked: whether torchrun started this process and set variables for it.
    """
    wrong = ("PET_",) if ranked else ("PET_", "TORCHELASTIC_")
    names = sorted(name for name in environment if name.startswith(wrong) or (name in OWN and not ranked))
    if not names:
        return ok("torchrun", "no variables of another job in the environment")
    return warn("torchrun", f"set in this shell: {', '.join(names)}", f"`unset {' '.join(names)}`")


def threads(ranked: bool, gpus: int, environment: Mapping[str, str] = os.environ, cores: int = 0) -> Finding:
    """Check the number of threads per rank; by default, torchrun gives each of several ranks a single thread."""
    cores = cores or len(os.sched_getaffinity(0))
    chosen, ranks = environment.get("OMP_NUM_THREADS", ""), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    ranks = ranks if ranked else max(1, gpus)
    if chosen == "1" and gpus and cores >= 2 * ranks:
        many = "1 rank" if ranks == 1 else f"{ranks} ranks"
        state = f"OMP_NUM_THREADS=1 with {cores} cores for {many}: work on the host is slow"
        return warn("threads", state, f"`export OMP_NUM_THREADS={cores // ranks}`, or start with launch/node.sh")
    return ok("threads", f"OMP_NUM_THREADS {chosen or 'not set'}, {cores} cores")


def own_name(resolve=socket.gethostbyname, name: str = "", environment: Mapping[str, str] = os.environ) -> Finding:
    """Check the host name's address, which gloo binds to. Other nodes cannot connect to a loopback address."""
    name = name or socket.gethostname()
    chosen = environment.get("GLOO_SOCKET_IFNAME", "")
    try:
        address = resolve(name)
    except OSError as error:
        state = f"{name} has no address ({error.strerror or error})"
    else:
        state = f"{name} is {address}"
        if not address.startswith("127."):
            return ok("own name", state)
    fix = (
        "on one machine nothing is wrong; on several, start with launch/node.sh, or set GLOO_SOCKET_IFNAME and "
        "NCCL_SOCKET_IFNAME to the interface between them (`ip addr` lists them)"
    )
    return ok("own name", f"{state}; GLOO_SOCKET_IFNAME is {chosen}") if chosen else warn("own name", state, fix)


def sandbox(start: Callable[[], Warm] = open_sandbox) -> Finding:
    """Run a small program in a sandbox, and check that it cannot access any file, port or process outside."""
    try:
        opened = start()
    except SandboxError as error:
        return warn("sandbox", error.why, error.fix or "only rewards that run a model's code need a sandbox")
    opened.close()
    return ok("sandbox", f"{opened.name} confines programs")


def hub_is_off(environment: Mapping[str, str]) -> bool:
    """Return True if HF_HUB_OFFLINE stops the hub client from sending requests."""
    return environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def hub(environment: Mapping[str, str] = os.environ, wait: float = 4.0) -> Finding:
    """Check that the model hub answers a HEAD request. wait: timeout in seconds."""
    place = environment.get("HF_ENDPOINT") or "https://huggingface.co"
    if hub_is_off(environment):
        return ok("hub", "HF_HUB_OFFLINE is set: no requests, models come from folders and the cache")
    try:
        with urllib.request.urlopen(urllib.request.Request(place, method="HEAD"), timeout=wait) as answer:
            return ok("hub", f"{place} answers ({answer.status})")
    except urllib.error.HTTPError as error:
        return ok("hub", f"{place} answers ({error.code})")
    except (OSError, ValueError) as error:
        fix = "give --model.path and --data.train as folders and files, with HF_HUB_OFFLINE=1"
        return warn("hub", f"{place}: {getattr(error, 'reason', error)}", fix)


# ── the folder for checkpoints ───────────────────────────────────────────────


class FolderError(ValueError):
    """Raised for a folder or file that the doctor cannot write to."""


def nearest(folder: Path) -> Path:
    """Return the folder if it exists, or its nearest existing parent otherwise.

    Raises:
        FolderError: a component of the path is not a folder, or the folder is not writable.
    """
    at = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not at.is_dir():
        raise FolderError(f"{folder}: {at} is not a folder")
    if not os.access(at, os.W_OK | os.X_OK):
        raise FolderError(f"{folder}: this user cannot write to {at}")
    return at


def folder(place: Path, mib: int) -> list[Finding]:
    """Check a folder's write speed, free space and file locks, using a temporary file of `mib` MiB.

    Raises:
        FolderError: the folder cannot be written to.
    """
    at = nearest(place)
    file = at / f".doctor-{secrets.token_hex(6)}"
    try:
        data = os.urandom(MIB)
        began = time.perf_counter()
        with open(file, "wb") as out:
            for _ in range(mib):
                out.write(data)
            out.flush()
            os.fsync(out.fileno())
        speed = mib * MIB / 1e6 / (time.perf_counter() - began)
        locks = lock(file)
    except OSError as error:
        raise FolderError(f"{place}: nothing can be written in {at}: {error.strerror or error}") from error
    finally:
        file.unlink(missing_ok=True)
    free = shutil.disk_usage(at).free
    faster = "put --run.dir on a faster file system: ranks wait while a checkpoint is written"
    more = "delete files, lower --checkpoint.keep, or choose another --run.dir"
    return [
        either(speed < SLOW, False, "disk", f"{at}: {speed:.0f} MB/s for {mib} MiB with fsync", faster),
        either(free < LITTLE, False, "room", f"{free / GIB:.1f} GiB free", more),
        locks,
    ]


def lock(file: Path) -> Finding:
    """Check that a file lock excludes other processes, since two jobs must not share a run folder."""
    fix = (
        "mount the file system with locks (Lustre: -o flock); without them two jobs in one run folder are noticed late"
    )
    with open(file, "r+b") as mine:
        try:
            fcntl.lockf(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return warn("locks", f"the file system does not support locks ({error.strerror})", fix)
        child = multiprocessing.get_context("fork").Process(target=_try, args=(str(file),))
        child.start()
        child.join(10)
        if child.is_alive():
            child.kill()
            return warn("locks", "a second process waits for the lock instead of being refused", fix)
        if child.exitcode:
            return warn("locks", "a lock does not exclude a second process", fix)
    return ok("locks", "a lock excludes a second process")


def _try(file: str) -> None:
    """Exit with 0 if the lock is refused because another process holds it."""
    with open(file, "r+b") as theirs:
        try:
            fcntl.lockf(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os._exit(0 if error.errno in (errno.EACCES, errno.EAGAIN) else 1)
    os._exit(1)
