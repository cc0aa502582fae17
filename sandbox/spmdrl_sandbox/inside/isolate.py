"""Namespaces, limits and rights of one program inside the sandbox. Standard library only.

A program gets a user, mount, process and IPC namespace of its own below those of the sandbox, an empty /tmp with a
quota, resource limits, no capabilities, and a filter of system calls (filter.py).
"""

import ctypes
import os
import resource
import signal
import struct

from spmdrl_sandbox.inside import filter as system_calls

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID = 0x20000, 0x8000000, 0x10000000, 0x20000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE, _MS_BIND = 2, 4, 8, 0x4000, 0x40000, 0x1000
_MS_RDONLY = 1
_SET_PDEATHSIG, _SET_DUMPABLE, _CAPBSET_DROP = 1, 4, 24
LIBC = ctypes.CDLL(None, use_errno=True)
_HELD = ctypes.PyDLL(None, use_errno=True)
_CLONE = {"x86_64": 56, "aarch64": 220}
"""Number of the system call `clone`."""
SPARE_ADDRESSES = 1 << 30
"""Bytes of addresses beyond a program's memory: libraries and threads reserve more than they use."""
OWN_PROCESSES = 2
"""Processes of the sandbox's own in a program's namespace, which its process limit counts too."""
SIGNALS = 64
"""Signals that wait for a program's processes; the kernel counts them for its user."""


def _must(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    LIBC.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def become(user: int) -> None:
    """Become an unprivileged user for good, if root: the kernel's limits on processes do not hold for root."""
    if os.getuid() == 0 and user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        # A change of user closes /proc/self to the process, which has to write its own user map there.
        LIBC.prctl(_SET_DUMPABLE, 1, 0, 0, 0)


def fork_apart() -> int:
    """Fork a process that is the first one in namespaces of its own, of users, mounts, processes and IPC.

    As `os.fork`, 0 in the new process. One call of the kernel's makes both, so that no process has to leave namespaces
    and fork another.
    """
    python, number = ctypes.pythonapi, _CLONE[os.uname().machine]
    flags = _NEWUSER | _NEWNS | _NEWPID | _NEWIPC | signal.SIGCHLD
    python.PyOS_BeforeFork()
    # Python's interpreter stays locked over the call, as over its own fork.
    child = _HELD.syscall(number, flags, None, None, None, None)
    error = ctypes.get_errno()
    if child == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    if child < 0:
        raise OSError(error, f"clone: {os.strerror(error)}")
    return child


def own_places(tmp_bytes: int, user: int, group: int) -> None:
    """Give the first process of new namespaces its user and its files.

    tmp_bytes: quota of /tmp, which is empty, and of /dev/shm, which is the same place. user, group: of its parent.
    """
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _must(LIBC.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount /")
    words = f"size={tmp_bytes},nr_inodes=4096,mode=0700".encode()
    _must(LIBC.mount(b"tmpfs", b"/tmp", b"tmpfs", _MS_NOSUID | _MS_NODEV, words), "mount /tmp")
    if os.path.isdir("/dev/shm"):
        _must(LIBC.mount(b"/tmp", b"/dev/shm", None, _MS_BIND, None), "mount /dev/shm")


def own_proc(allowed: bool) -> bool:
    """Show this process namespace alone in /proc, or nothing where the kernel does not allow that; tells which.

    allowed: the kernel allows it, as far as is known. It notes every refusal in the machine's log.
    """
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    if allowed and not LIBC.mount(b"proc", b"/proc", b"proc", flags, None):
        return True
    _must(LIBC.mount(b"tmpfs", b"/proc", b"tmpfs", flags | _MS_RDONLY, b"size=0"), "mount /proc")
    return False


def hide() -> None:
    """Keep other processes of the same user from reading or writing this one's memory."""
    LIBC.prctl(_SET_DUMPABLE, 0, 0, 0, 0)


def limit(limits: dict, shared: bool = False) -> None:
    """Set resource limits of this process and its children. limits: fields of `Limits`.

    shared: others run as this user, whose processes the kernel's limit would count too.
    """
    memory = limits["memory_mib"] << 20
    most = resource.getrlimit(resource.RLIMIT_NPROC)[1] if shared else limits["processes"] + OWN_PROCESSES
    for what, value in (
        (resource.RLIMIT_AS, memory + SPARE_ADDRESSES),
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_NPROC, most),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_FSIZE, limits["tmp_mib"] << 20),
        # With 0 a program of the machine that takes cores would still be started, and with 1 it is not (fs/coredump.c).
        (resource.RLIMIT_CORE, 1),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, SIGNALS),
        (resource.RLIMIT_NICE, 0),
        (resource.RLIMIT_RTPRIO, 0),
    ):
        resource.setrlimit(what, (value, value))


def drop_rights(shared: bool = False) -> None:
    """Give up all capabilities for good, and install the filter of system calls. shared: as in `filter.program`."""
    for capability in range(64):
        if LIBC.prctl(_CAPBSET_DROP, capability, 0, 0, 0):
            break
    version = 0x20080522
    header, none = struct.pack("Ii", version, 0), bytes(24)
    _must(LIBC.capset(header, none), "capset")
    system_calls.install(shared=shared)
