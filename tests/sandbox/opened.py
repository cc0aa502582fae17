"""Sandboxes for the tests of this folder, which are skipped where none works; in CI they must."""

import os

import pytest

from spmdrl.sandbox.base import SandboxError
from spmdrl.sandbox.open import AUTO, open_sandbox
from spmdrl.sandbox.warm import Warm

EACH = pytest.mark.parametrize("provider", AUTO)


def open_or_skip(provider: str = "auto") -> Warm:
    """Opens a sandbox."""
    try:
        return open_sandbox(provider)
    except SandboxError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
