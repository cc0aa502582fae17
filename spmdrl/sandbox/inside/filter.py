"""A seccomp filter for hostile programs: system calls that a program has no use for, and the kernel has had faults in.

The filter denies with EPERM, and clone3 with ENOSYS, so that the C library falls back to clone, whose flags a filter
can see (https://man7.org/linux/man-pages/man2/seccomp.2.html). It is installed after the namespaces are made.
Standard library only: it runs inside the sandbox.
"""

import ctypes
import errno
import os
import struct

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NEW_NAMESPACES = 0x7E020000 | 0x80
"""CLONE_NEWUSER, NEWPID, NEWNS, NEWNET, NEWIPC, NEWUTS, NEWCGROUP, and NEWTIME."""
_X32 = 0x40000000
"""Bit of the numbers of x32, a second table of system calls on x86_64."""
FAMILIES = (1, 2, 10)
"""Families of sockets that stay, UNIX and both of IP: they end in the sandbox's own network. AF_VSOCK would reach the
host of a VM. Where there is no such network UNIX alone stays: Landlock sees TCP's connect and bind, and neither MPTCP
nor listen."""

NUMBERS: dict[str, tuple[int, int]] = {
    # name: (x86_64, aarch64)
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
    "lookup_dcookie": (212, 18),
    "vhangup": (153, 58),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
}
SHARED: dict[str, tuple[int, int]] = {
    # -1: aarch64 has none.
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
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
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
    "inotify_init": (253, -1),
    "inotify_init1": (294, 26),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
}
"""Calls that act on files and processes of a program's user, and that Landlock does not see. They are denied where a
program shares its user with its caller."""
FIRST_UNKNOWN = 451
"""Number from which on calls may act like those of `SHARED` (fchmodat2, setxattrat, file_setattr) and are unknown to
programs that share their user: libraries then use older ones. One table of numbers for all machines from 424 on."""
_CLONE, _CLONE3, _SOCKET, _PRLIMIT, _FCNTL = (56, 220), (435, 435), (41, 198), (302, 261), (72, 25)
_SET_LEASE, _NOTIFY = 1024, 1026
"""Commands of fcntl that delay or watch what others do with a file."""
_LOAD, _JUMP_EQUAL, _JUMP_SET, _JUMP_GREATER_EQUAL, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
"""Offsets in the kernel's seccomp_data; of arguments the low half on a little-endian machine."""


def _line(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """Encode one instruction: jumps go `then` lines on where it holds, else `otherwise` lines."""
    return struct.pack("<HBBI", code, then, otherwise, value)


def program(machine: str, shared: bool = False) -> bytes:
    """Return the filter for a machine (`os.uname().machine`). shared: programs run as their caller's user.

    Raises:
        ValueError: a machine whose system calls it does not know.
    """
    if machine not in _ARCHITECTURES:
        raise ValueError(f"the sandbox knows no system calls of {machine}")
    which = list(_ARCHITECTURES).index(machine)
    deny = _line(_RETURN, _ERRNO | errno.EPERM)
    lines = [
        _line(_LOAD, _ARCHITECTURE),
        _line(_JUMP_EQUAL, _ARCHITECTURES[machine], 1, 0),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        lines += [_line(_JUMP_GREATER_EQUAL, _X32, 0, 1), deny]
    lines += [_line(_JUMP_EQUAL, _CLONE3[which], 0, 1), _line(_RETURN, _ERRNO | errno.ENOSYS)]
    if shared:
        lines += [_line(_JUMP_GREATER_EQUAL, FIRST_UNKNOWN, 0, 1), _line(_RETURN, _ERRNO | errno.ENOSYS)]
        # prlimit(pid, ...) of this process alone, whose pid is 0 there.
        lines += [_line(_JUMP_EQUAL, _PRLIMIT[which], 0, 3), _line(_LOAD, _FIRST_ARGUMENT)]
        lines += [_line(_JUMP_EQUAL, 0, 1, 0), deny, _line(_LOAD, _NUMBER)]
        lines += [_line(_JUMP_EQUAL, _FCNTL[which], 0, 5), _line(_LOAD, _SECOND_ARGUMENT)]
        lines += [_line(_JUMP_EQUAL, _SET_LEASE, 1, 0), _line(_JUMP_EQUAL, _NOTIFY, 0, 1), deny, _line(_LOAD, _NUMBER)]
    for numbers in (NUMBERS | (SHARED if shared else {})).values():
        if numbers[which] >= 0:
            lines += [_line(_JUMP_EQUAL, numbers[which], 0, 1), deny]
    # clone(flags, ...) without new namespaces.
    lines += [_line(_JUMP_EQUAL, _CLONE[which], 0, 3), _line(_LOAD, _FIRST_ARGUMENT)]
    lines += [_line(_JUMP_SET, _NEW_NAMESPACES & 0xFFFFFFFF, 0, 1), deny]
    # The accumulator may hold the flags of clone.
    families = FAMILIES[:1] if shared else FAMILIES
    lines += [
        _line(_LOAD, _NUMBER),
        _line(_JUMP_EQUAL, _SOCKET[which], 0, len(families) + 2),
        _line(_LOAD, _FIRST_ARGUMENT),
    ]
    for i, family in enumerate(families):
        lines.append(_line(_JUMP_EQUAL, family, len(families) - i, 0))
    lines += [deny, _line(_RETURN, _ALLOW)]
    return b"".join(lines)


def install(machine: str = "", shared: bool = False) -> None:
    """Put this process and its later children under the filter, for good. shared: as in `program`.

    Raises:
        OSError: the kernel has no seccomp.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    code = program(machine or os.uname().machine, shared)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    pr_set_no_new_privs, pr_set_seccomp, mode_filter = 38, 22, 2
    for call in ((pr_set_no_new_privs, 1, 0, 0, 0), (pr_set_seccomp, mode_filter, header, 0, 0)):
        if libc.prctl(*call):
            raise OSError(ctypes.get_errno(), "no system call filter (seccomp)")
