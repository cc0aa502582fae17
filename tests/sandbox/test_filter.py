"""The filter of system calls: its numbers are those of the kernel."""

import re
from pathlib import Path

import pytest

from spmdrl.sandbox.inside.filter import (
    _CLONE,
    _CLONE3,
    _FCNTL,
    _PRLIMIT,
    _SOCKET,
    FIRST_UNKNOWN,
    NUMBERS,
    SHARED,
    program,
)

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
"""Where Debian's linux-libc-dev has the numbers; arm64 has the generic ones."""


@pytest.mark.parametrize("machine", HEADERS)
def test_numbers_are_those_of_the_kernels_headers(machine):
    if not HEADERS[machine].exists():
        pytest.skip(f"no {HEADERS[machine]} (linux-libc-dev)")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text())
    known = {name: int(number) for name, number in found}
    ours = (
        NUMBERS
        | SHARED
        | {"clone": _CLONE, "clone3": _CLONE3, "socket": _SOCKET, "prlimit64": _PRLIMIT, "fcntl": _FCNTL}
    )
    place = list(HEADERS).index(machine)
    # aarch64 lacks the older ones of two forms of a call.
    assert {name: numbers[place] for name, numbers in ours.items()} == {name: known.get(name, -1) for name in ours}
    assert (
        all(numbers[place] >= 0 for numbers in NUMBERS.values())
        and machine != "x86_64"
        or -1 not in {numbers[0] for numbers in ours.values()}
    )
    assert all(known.get(name, FIRST_UNKNOWN) >= FIRST_UNKNOWN for name in ("fchmodat2", "setxattrat", "file_setattr"))


def test_an_unknown_machine_is_refused():
    with pytest.raises(ValueError, match="knows no system calls of riscv64"):
        program("riscv64")
