"""Element types as torch names them."""

from __future__ import annotations

import torch

from flashtune.problem import Dtype

TORCH_DTYPES = {
    Dtype.BF16: torch.bfloat16,
    Dtype.FP16: torch.float16,
    Dtype.FP32: torch.float32,
    Dtype.E4M3: torch.float8_e4m3fn,
}
DTYPES = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}
