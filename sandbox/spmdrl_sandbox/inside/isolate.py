"""Sets namespaces, limits and privileges of one program inside the sandbox. It needs only the standard library.

In a bubblewrap sandbox, a program runs in separate user, mount, process and IPC namespaces. It has an empty /tmp with a
quota, resource limits, no capabilities, and a system call filter (filter.py).
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
"""Number of the system call `clone` by machine."""
SPARE_ADDRESSES = 1 << 30
"""Bytes of address space beyond a program's memory limit, since libraries and threads reserve more than they use."""
OWN_PROCESSES = 2
"""Number of processes that the sandbox runs in a program's namespace, which count towards the program's limit."""
SIGNALS = 64
"""Maximum number of pending signals, which the kernel counts per user."""


def _must(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    LIBC.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def become(user: int) -> None:
    """Irrevocably change from root to an unprivileged user, because the kernel's process limits do not apply to root.

    The function does nothing if this process is not root or if `user` is 0.
    """
    if os.getuid() == 0 and user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        # Without this flag, the process could not write its user map to /proc/self after the change of user.
        LIBC.prctl(_SET_DUMPABLE, 1, 0, 0, 0)


def fork_apart() -> int:
    """Fork a process that is the first one in new user, mount, process and IPC namespaces.

    Return 0 in the new process and its id in the parent, as `os.fork` does. A single system call creates the process
    and its namespaces; `unshare` would need a second fork.
    """
    python, number = ctypes.pythonapi, _CLONE[os.uname().machine]
    flags = _NEWUSER | _NEWNS | _NEWPID | _NEWIPC | signal.SIGCHLD
    python.PyOS_BeforeFork()
    # `PyDLL` keeps the interpreter's lock during the call, as `os.fork` does.
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
    """Set the user map of new namespaces and mount an empty /tmp. Call this in the namespaces' first process.

    tmp_bytes: quota of /tmp, which is also mounted as /dev/shm. user, group: ids of the parent process.
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
    """Mount a /proc that shows only this process namespace; return whether the kernel permits it.

    If the kernel refuses the mount, /proc becomes empty. allowed: False if the kernel has refused the mount before. The
    mount is then not tried again, because the kernel logs each refusal.
    """
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    if allowed and not LIBC.mount(b"proc", b"/proc", b"proc", flags, None):
        return True
    _must(LIBC.mount(b"tmpfs", b"/proc", b"tmpfs", flags | _MS_RDONLY, b"size=0"), "mount /proc")
    return False


def hide() -> None:
    """Prevent other processes of the same user from reading or writing the memory of this process."""
    LIBC.prctl(_SET_DUMPABLE, 0, 0, 0, 0)


def limit(limits: dict, shared: bool = False) -> None:
    """Set resource limits of this process and its children.

    limits: fields of `Limits`. shared: True if other programs run as the same user. The number of processes is then not
    limited, because the kernel would also count the other programs' processes.
    """
    memory = limits["memory_mib"] << 20
    most = resource.getrlimit(resource.RLIMIT_NPROC)[1] if shared else limits["processes"] + OWN_PROCESSES
    for what, value in (
        (resource.RLIMIT_AS, memory + SPARE_ADDRESSES),
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_NPROC, most),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_FSIZE, limits["tmp_mib"] << 20),
        # At 0 the kernel would still start the machine's core dump handler; at 1 it does not (fs/coredump.c).
        (resource.RLIMIT_CORE, 1),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, SIGNALS),
        (resource.RLIMIT_NICE, 0),
        (resource.RLIMIT_RTPRIO, 0),
    ):
        resource.setrlimit(what, (value, value))


def drop_rights(shared: bool = False) -> None:
    """Permanently drop all capabilities, and install the system call filter. shared: as in `filter.program`."""
    for capability in range(64):
        if LIBC.prctl(_CAPBSET_DROP, capability, 0, 0, 0):
            break
    version = 0x20080522
    header, none = struct.pack("Ii", version, 0), bytes(24)
    _must(LIBC.capset(header, none), "capset")
    system_calls.install(shared=shared)
