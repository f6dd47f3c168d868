"""vLLM's own Triton kernel, loaded from files that the tester provides. They are no part of this repository.

FLASHTUNE_VLLM_OPS names the folder `vllm/v1/attention/ops` of vLLM 0.33, or a copy of two of its files:
`triton_unified_attention.py` and `triton_attention_helpers.py`. The rest of vLLM is not needed.
"""

import enum
import importlib
import math
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

VARIABLE = "FLASHTUNE_VLLM_OPS"
PACKAGE = "vllm.v1.attention.ops"
# Constants of vLLM's backend for this kernel.
MIN_PROGRAMS, SEGMENTS = 128, 16


class Modes(enum.IntEnum):
    """Modes of quantized caches."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


class Platform:
    """A GPU of NVIDIA before Blackwell."""

    @staticmethod
    def fp8_dtype() -> torch.dtype:
        return torch.float8_e4m3fn

    @staticmethod
    def is_device_capability_family(_: int) -> bool:
        return False


class Logger:
    def debug_once(self, *_: object) -> None:
        """Writes nothing."""


def load(patch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns vLLM's function, or skips the test with the reason."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"{VARIABLE} names no folder with vLLM's kernel")
    parts: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": lambda _: Logger()},
        "vllm.platforms": {"current_platform": Platform},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": Modes},
        PACKAGE: {},
    }
    for name, members in parts.items():
        module = types.ModuleType(name)
        module.__path__ = [folder] if name == PACKAGE else []
        vars(module).update(members)
        patch.setitem(sys.modules, name, module)
        package, _, last = name.rpartition(".")
        if package:
            setattr(sys.modules[package], last, module)
    for path in Path(folder).glob("*.py"):
        patch.delitem(sys.modules, f"{PACKAGE}.{path.stem}", raising=False)
    try:
        function: Callable[..., None] = importlib.import_module(
            f"{PACKAGE}.triton_unified_attention"
        ).unified_attention
    except Exception as error:  # noqa: BLE001 - files of another version fail in any way
        pytest.skip(f"{VARIABLE}: vLLM's kernel cannot be loaded from {folder}: {error!r}")
    return function


class VllmKernel:
    """Attention of a batch by vLLM's kernel, as vLLM's backend calls it."""

    def __init__(
        self, function: Callable[..., None], heads: int, kv_heads: int, width: int, device: str
    ) -> None:
        self._function = function
        self._threshold = MIN_PROGRAMS // kv_heads
        shape = self._threshold, heads, SEGMENTS
        width = 2 ** math.ceil(math.log2(width))
        self._parts = torch.empty(*shape, width, device=device)
        self._sums = [torch.empty(shape, device=device) for _ in range(2)]

    def __call__(
        self,
        q: Tensor,
        cache: Tensor,
        common: Any,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        slopes: list[float] | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Returns the attention of queries [tokens, heads, width] to a packed cache with their keys.

        `common` is vLLM's metadata of the batch, and `window` counts the query's own key.
        """
        tokens, batch = common.num_actual_tokens, common.num_reqs
        k, v = cache.transpose(1, 2).split(q.shape[2], dim=-1)
        out = torch.empty_like(q)
        scales = torch.ones((), device=q.device).expand(batch, k.shape[2])
        self._function(
            q=q[:tokens],
            k=k,
            v=v,
            out=out[:tokens],
            cu_seqlens_q=common.query_start_loc[: batch + 1],
            max_seqlen_q=common.max_query_len,
            seqused_k=common.seq_lens[:batch],
            max_seqlen_k=common.max_seq_len,
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            block_table=common.block_table_tensor[:batch],
            softcap=softcap or 0,
            q_descale=None,
            k_descale=scales,
            v_descale=scales,
            seq_threshold_3D=self._threshold,
            num_par_softmax_segments=SEGMENTS,
            softmax_segm_output=self._parts,
            softmax_segm_max=self._sums[0],
            softmax_segm_expsum=self._sums[1],
            alibi_slopes=None if slopes is None else torch.tensor(slopes, device=q.device),
            sinks=sinks,
        )
        return out
