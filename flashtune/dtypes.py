"""Element types as torch names them."""

from __future__ import annotations

import torch

from flashtune.features import KvDtype
from flashtune.problem import Dtype

TORCH_DTYPES = {
    Dtype.BF16: torch.bfloat16,
    Dtype.FP16: torch.float16,
    Dtype.FP32: torch.float32,
    Dtype.E4M3: torch.float8_e4m3fn,
}
# Those of quantised caches beside queries that are not quantised.
STORED_DTYPES = {KvDtype.E4M3: torch.float8_e4m3fn, KvDtype.INT8: torch.int8}
DTYPES = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}
KV_DTYPES = {torch_dtype: dtype for dtype, torch_dtype in STORED_DTYPES.items()}
# Magnitudes that elements of a quantised cache go up to; int8 is used on both sides of zero alike.
LARGEST_STORED = {KvDtype.E4M3: 448.0, KvDtype.INT8: 127.0}
# Floats that torch computes with.
WIDE_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
