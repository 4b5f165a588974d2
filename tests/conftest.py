"""Where there is no GPU, Triton's interpreter stands in for one; that is decided before any kernel is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
