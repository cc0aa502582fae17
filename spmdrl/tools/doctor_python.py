"""Checks the version of Python. An old one imports this file and what it imports, so they keep to old syntax."""

import sys

from spmdrl.tools.doctor_findings import Finding, either

PYTHON = (3, 11)


def python(version: tuple = sys.version_info[:3]) -> Finding:
    """Checks that the interpreter is new enough for the project."""
    said = f"{'.'.join(map(str, version))}, {sys.executable}"
    least = ".".join(map(str, PYTHON))
    return either(version < PYTHON, True, "Python", said, f"install {least} or later: PYTHON=... ./launch/install.sh")
