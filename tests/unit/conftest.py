"""Unit tests have the same result whatever optional installs left on the machine."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def sglang_counts_as_installed(monkeypatch):
    """Settings are checked as if SGLang were there; a test of its absence sets this anew."""
    monkeypatch.setattr("spmdrl.config.engines.sglang_python", lambda: Path("python"))
