"""Problems and configs of the split-KV family."""

import functools
from typing import Any

import torch

from flashtune import testing
from flashtune.core.target import find_target
from flashtune.templates.decode_split_kv.space import DecodeConfig
from flashtune.templates.registry import find_family

FAMILY = find_family("decode_split_kv")
H200, A100 = find_target("h200"), find_target("a100")
LATENT = {"head_dim": 576, "value_head_dim": 512, "kv_heads": 1, "mla": True}
a_problem = functools.partial(
    testing.problem, "heads=32,kv_heads=8,seqlen_q=1,seqlen_kv=8192,head_dim=128,dtype=bf16,causal"
)


def a_config(**changes: Any) -> DecodeConfig:
    values: dict[str, Any] = {"block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 3, "num_splits": 4}
    return DecodeConfig(**{**values, **changes})


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
