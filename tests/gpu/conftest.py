import pytest


@pytest.fixture(autouse=True)
def needs_cuda():
    """Skip every test of this folder, with the reason, where torch sees no CUDA device."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device on this machine")
