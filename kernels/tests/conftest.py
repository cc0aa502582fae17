"""Where there is no GPU, Triton's interpreter runs the kernels. It has to be chosen before triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
