"""A seccomp filter for untrusted programs (https://man7.org/linux/man-pages/man2/seccomp.2.html).

It denies system calls that programs do not need and whose kernel code has had vulnerabilities. It also denies calls
that allocate memory the watcher does not count, that create objects which outlive the program, or that use up a kernel
quota which all sandboxes of a user share. Denied calls fail with EPERM. clone3, copies within the kernel, and unknown
calls fail with ENOSYS, after which libraries try other calls. The filter is installed after the namespaces are
created. The module needs only the standard library, as it runs inside the sandbox.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterable, Sequence

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NEW_NAMESPACES = 0x7E020000 | 0x80
"""Flags of `clone` that create namespaces: NEWUSER, NEWPID, NEWNS, NEWNET, NEWIPC, NEWUTS, NEWCGROUP and NEWTIME."""
_X32 = 0x40000000
"""Bit that marks the numbers of x32 system calls, a second call table of x86_64."""
FAMILIES = (1,)
"""Allowed socket families: only AF_UNIX. The kernel may buffer gigabytes for IP connections, up to a limit of the
machine, and keeps closed connections for a minute. AF_VSOCK would reach the host of a VM."""

NUMBERS: dict[str, tuple[int, int]] = {
    # Each entry is `name: (number on x86_64, number on aarch64)`.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "personality": (135, 92),
    "fanotify_init": (300, 262),
    # -1 marks calls that aarch64 lacks.
    "inotify_init": (253, -1),
    "inotify_init1": (294, 26),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "io_setup": (206, 0),
    "flock": (73, 32),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "lookup_dcookie": (212, 18),
    "vhangup": (153, 58),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
}
SHARED: dict[str, tuple[int, int]] = {
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, -1),
    "lchown": (94, -1),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, -1),
    "utimes": (235, -1),
    "futimesat": (261, -1),
    "utimensat": (280, 88),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "migrate_pages": (256, 238),
}
"""System calls that act on the files and processes of the program's user, and that Landlock does not restrict. The
calls are denied if a program runs as the same user as its caller."""
COPIES: dict[str, tuple[int, int]] = {
    "sendfile": (40, 71),
    "splice": (275, 76),
    "tee": (276, 77),
    "vmsplice": (278, 75),
}
"""Calls that put pages of a file or process into a pipe or socket. One byte can keep a whole 2 MiB page there. The
watcher does not count these pages after the file is truncated or the process releases them."""
FIRST_UNKNOWN = 451
"""Lowest number of a call that this filter does not know. Some of the unknown calls act like denied calls (fchmodat2,
setxattrat, open_tree_attr). Numbers of 424 and above are the same on all architectures."""
SEEN: dict[str, tuple[int, int]] = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "setsockopt": (54, 208),
    "prlimit64": (302, 261),
    "fcntl": (72, 25),
    "mmap": (9, 222),
}
"""Calls that are denied for certain arguments (`_arguments`)."""
_FCNTL = {"F_SETLEASE": 1024, "F_NOTIFY": 1026, "F_SETPIPE_SZ": 1031}
"""Denied commands of fcntl. F_SETLEASE delays other processes' access to a file, and F_NOTIFY watches access to the
files in a directory. F_SETPIPE_SZ enlarges a pipe, whose memory counts against a quota of the user."""
_SOL_SOCKET, _BUFFERS = 1, (7, 8)
"""Denied socket options SO_SNDBUF and SO_RCVBUF, which could make buffers far larger than the default."""
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x1, 0x20, 0x40000
_LOAD, _JUMP_EQUAL, _JUMP_SET, _JUMP_GREATER_EQUAL, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in the kernel's struct seccomp_data. Each argument has 8 bytes, with the low half first on little-endian."""


def _line(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """Encode one BPF instruction. A jump skips `then` instructions if its condition is true, else `otherwise`."""
    return struct.pack("<HBBI", code, then, otherwise, value)


def _argument(place: int) -> bytes:
    """Return the instruction that loads the low half of the argument with index `place`."""
    return _line(_LOAD, _ARGUMENTS + 8 * place)


_DENY = _line(_RETURN, _ERRNO | errno.EPERM)
_ABSENT = _line(_RETURN, _ERRNO | errno.ENOSYS)


def _one_of(values: Iterable[int]) -> list[bytes]:
    """Return instructions that deny the call if the loaded value is one of `values`."""
    return [line for value in values for line in (_line(_JUMP_EQUAL, value, 0, 1), _DENY)]


def _none_of(values: Sequence[int]) -> list[bytes]:
    """Return instructions that deny the call if the loaded value is not one of `values`."""
    return [*(_line(_JUMP_EQUAL, value, len(values) - i, 0) for i, value in enumerate(values)), _DENY]


def _arguments(own: int) -> dict[str, list[bytes]]:
    """Return instructions by system call name. These instructions deny calls with certain arguments and let other calls
    pass.

    own: id of this process.
    """
    families = [_argument(0), *_none_of(FAMILIES)]
    return {
        "clone": [_argument(0), _line(_JUMP_SET, _NEW_NAMESPACES & 0xFFFFFFFF, 0, 1), _DENY],
        "clone3": [_ABSENT],
        "socket": families,
        "socketpair": families,
        "setsockopt": [
            *(_argument(1), _line(_JUMP_EQUAL, _SOL_SOCKET, 0, 1 + 2 * len(_BUFFERS))),
            *(_argument(2), *_one_of(_BUFFERS)),
        ],
        # Process id 0 means the calling process.
        "prlimit64": [_argument(0), *_none_of((0, own))],
        "fcntl": [_argument(1), *_one_of(_FCNTL.values())],
        "mmap": [
            *(_argument(3), _line(_JUMP_SET, _MAP_HUGETLB, 0, 1), _DENY),
            *(_line(_JUMP_SET, _MAP_ANONYMOUS, 0, 2), _line(_JUMP_SET, _MAP_SHARED, 0, 1), _DENY),
        ],
    }


def program(machine: str, shared: bool = False, own: int = 0) -> bytes:
    """Return the BPF program of the filter for a machine (`os.uname().machine`).

    shared: True if programs run as the user of their caller. own: id of the process that installs the filter. Programs
    may set resource limits only for that process and for the calling process.

    Raises:
        ValueError: the numbers of the machine's system calls are unknown.
    """
    if machine not in _ARCHITECTURES:
        raise ValueError(f"the sandbox does not support the system calls of {machine}")
    which = list(_ARCHITECTURES).index(machine)
    lines = [
        _line(_LOAD, _ARCHITECTURE),
        _line(_JUMP_EQUAL, _ARCHITECTURES[machine], 1, 0),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        lines += [_line(_JUMP_GREATER_EQUAL, _X32, 0, 1), _DENY]
    lines += [_line(_JUMP_GREATER_EQUAL, FIRST_UNKNOWN, 0, 1), _ABSENT]
    denied = [numbers[which] for numbers in (NUMBERS | (SHARED if shared else {})).values()]
    lines += _one_of(number for number in denied if number >= 0)
    lines += [line for numbers in COPIES.values() for line in (_line(_JUMP_EQUAL, numbers[which], 0, 1), _ABSENT)]
    for name, body in _arguments(own).items():
        lines += [_line(_JUMP_EQUAL, SEEN[name][which], 0, len(body) + 1), *body, _line(_RETURN, _ALLOW)]
    return b"".join([*lines, _line(_RETURN, _ALLOW)])


def install(machine: str = "", shared: bool = False) -> None:
    """Permanently install the filter for this process and its future children. shared: as in `program`.

    Raises:
        OSError: the kernel has no seccomp.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    code = program(machine or os.uname().machine, shared, os.getpid())
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    pr_set_no_new_privs, pr_set_seccomp, mode_filter = 38, 22, 2
    for call in ((pr_set_no_new_privs, 1, 0, 0, 0), (pr_set_seccomp, mode_filter, header, 0, 0)):
        if libc.prctl(*call):
            raise OSError(ctypes.get_errno(), "no system call filter (seccomp)")
