"""The filter of system calls: its numbers are those of the kernel."""

import re
from pathlib import Path

import pytest

from spmdrl.sandbox.inside.filter import _CLONE, _CLONE3, _SOCKET, NUMBERS, program

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
    ours = NUMBERS | {"clone": _CLONE, "clone3": _CLONE3, "socket": _SOCKET}
    place = list(HEADERS).index(machine)
    assert {name: numbers[place] for name, numbers in ours.items()} == {name: known[name] for name in ours}


def test_an_unknown_machine_is_refused():
    with pytest.raises(ValueError, match="knows no system calls of riscv64"):
        program("riscv64")
