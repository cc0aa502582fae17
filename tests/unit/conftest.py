"""Unit tests have the same result whatever optional installs left on the machine."""

from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def sglang_counts_as_installed(monkeypatch):
    """Settings are checked as if SGLang were there; a test of its absence sets this anew.

    An interpreter of environments has no tyro, and checks no settings.
    """
    if find_spec("tyro"):
        monkeypatch.setattr("spmdrl.config.engines.sglang_python", lambda: Path("python"))
