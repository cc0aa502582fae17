"""The filter of system calls: its numbers are those of the kernel, and it decides as the kernel's machine runs it."""

import errno
import re
import struct
from pathlib import Path

import pytest

from spmdrl_sandbox.inside.filter import COPIES, FIRST_UNKNOWN, NUMBERS, SEEN, SHARED, program

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
"""Where Debian's linux-libc-dev has the numbers; arm64 has the generic ones."""
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_X86_64 and AUDIT_ARCH_AARCH64 of linux/audit.h."""
OWN = 4711
ALL = NUMBERS | SHARED | COPIES | SEEN


@pytest.mark.parametrize("machine", HEADERS)
def test_numbers_are_those_of_the_kernels_headers(machine):
    if not HEADERS[machine].exists():
        pytest.skip(f"no {HEADERS[machine]} (linux-libc-dev)")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text())
    known = {name: int(number) for name, number in found}
    place = list(HEADERS).index(machine)
    # aarch64 lacks the older ones of two forms of a call.
    assert {name: numbers[place] for name, numbers in ALL.items()} == {name: known.get(name, -1) for name in ALL}
    assert machine != "x86_64" or -1 not in {numbers[0] for numbers in ALL.values()}
    assert all(known.get(name, FIRST_UNKNOWN) >= FIRST_UNKNOWN for name in ("fchmodat2", "setxattrat", "file_setattr"))


def decided(code: bytes, architecture: int, number: int, *arguments: int) -> str | int:
    """What a filter decides of a call: `allow`, `kill`, or an error number.

    It runs the instructions that linux/bpf_common.h names LD|W|ABS, JMP|JEQ|K, JMP|JGE|K, JMP|JSET|K and RET|K.
    """
    data = struct.pack("<iIQ6Q", number, architecture, 0, *(*arguments, *[0] * 6)[:6])
    lines = list(struct.iter_unpack("<HBBI", code))
    place = loaded = 0
    while True:
        kind, then, otherwise, value = lines[place]
        place += 1
        if kind == 0x20:
            (loaded,) = struct.unpack_from("<I", data, value)
        elif kind == 0x06:
            named = {0x7FFF0000: "allow", 0x80000000: "kill"}
            return named[value] if value in named else value - 0x50000
        else:
            holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[kind]
            place += then if holds else otherwise


MAP_SHARED, MAP_PRIVATE, MAP_ANONYMOUS, MAP_HUGETLB, MAP_FIXED, MAP_NORESERVE = 1, 2, 0x20, 0x40000, 0x10, 0x4000
F_SETLK, F_SETFD, F_DUPFD_CLOEXEC, F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ = 6, 2, 1030, 1024, 1026, 1031
CLONE_OF_FORK, CLONE_OF_THREADS, CLONE_NEWUSER, CLONE_NEWNET = 0x1200011, 0x3D0F00, 0x10000000, 0x40000000
DENIED = [
    ("mmap", (0, 4096, 3, MAP_SHARED | MAP_ANONYMOUS)),
    ("mmap", (0, 4096, 3, MAP_SHARED | MAP_PRIVATE | MAP_ANONYMOUS)),
    ("mmap", (0, 4096, 3, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED)),
    ("mmap", (0, 1 << 21, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB)),
    *(("fcntl", (0, command, 0)) for command in (F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ)),
    *(("prlimit64", (pid,)) for pid in (1, OWN - 1, OWN + 1, 0xFFFFFFFF)),
    *(("clone", (flags | 17,)) for flags in (CLONE_NEWUSER, CLONE_NEWNET, 0x20000, 0x80)),
    *((name, (family, 1)) for name in ("socket", "socketpair") for family in (0, 2, 10, 16, 17, 30, 38, 40, 1 << 31)),
    *(("setsockopt", (0, 1, option)) for option in (7, 8)),
]
"""Calls that are denied by their arguments; numbers are those of the kernel's headers."""
LEFT = [
    ("mmap", (0, 4096, 3, MAP_PRIVATE | MAP_ANONYMOUS)),
    ("mmap", (0, 4096, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED)),
    ("mmap", (0, 4096, 1, MAP_SHARED)),
    ("mmap", (0, 4096, 5, MAP_PRIVATE)),
    *(("fcntl", (0, command, 0)) for command in (F_SETLK, F_SETFD, F_DUPFD_CLOEXEC)),
    *(("prlimit64", (pid,)) for pid in (0, OWN)),
    *(("clone", (flags,)) for flags in (CLONE_OF_FORK, CLONE_OF_THREADS)),
    *((name, (1, 1)) for name in ("socket", "socketpair")),
    *(("setsockopt", words) for words in ((0, 1, 2), (0, 6, 7), (0, 1, 20))),
]
"""The same calls with arguments of ordinary programs."""


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_each_call_is_decided_by_its_name_and_its_arguments(machine, shared):
    code, place = program(machine, shared, OWN), list(ARCHITECTURES).index(machine)

    def of(number: int, *arguments: int) -> str | int:
        return decided(code, ARCHITECTURES[machine], number, *arguments)

    for name, arguments in DENIED:
        assert of(SEEN[name][place], *arguments) == errno.EPERM, (name, arguments)
        # The upper halves of arguments change nothing.
        assert of(SEEN[name][place], *(each | 1 << 32 for each in arguments)) == errno.EPERM, (name, arguments)
    for name, arguments in LEFT:
        assert of(SEEN[name][place], *arguments) == "allow", (name, arguments)
    assert of(SEEN["clone3"][place]) == errno.ENOSYS
    denied = NUMBERS | (SHARED if shared else {})
    wanted = {numbers[place]: errno.EPERM for numbers in denied.values()}
    wanted |= {numbers[place]: errno.ENOSYS for numbers in COPIES.values()}
    by_arguments = {numbers[place] for numbers in SEEN.values()}
    for number in set(range(FIRST_UNKNOWN)) - by_arguments:
        assert of(number) == wanted.get(number, "allow"), number
    assert {of(number) for number in (FIRST_UNKNOWN, 463, 500, 0x3FFFFFFF)} == {errno.ENOSYS}
    assert of(0x40000000 | 39) == (errno.EPERM if machine == "x86_64" else errno.ENOSYS)
    (other,) = {*ARCHITECTURES.values()} - {ARCHITECTURES[machine]}
    assert decided(code, other, 39) == decided(code, 0x40000003, 20) == "kill"


def test_an_unknown_machine_is_refused():
    with pytest.raises(ValueError, match="does not support the system calls of riscv64"):
        program("riscv64")
