"""Selects Triton's interpreter on machines without a GPU, before anything imports triton."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
