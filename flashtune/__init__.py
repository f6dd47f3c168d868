"""Generates, searches, verifies and dispatches flash-attention kernels.

    import flashtune

    out = flashtune.attention(q, k, v, causal=True)

- `flashtune.attention_varlen` computes attention of packed sequences, and `flashtune.attention_paged`
  attention with a paged KV cache.
- `flashtune.flex_attention` computes attention with a score function and a mask function of the program.
- `flashtune.plan` prepares a call in advance.
- `flashtune.explain` returns the backend of a call and the reason.
- `flashtune.BlockMask` names the blocks of keys that each block of queries sees.
- `flashtune.quantize` converts inputs to 8-bit floats.
- `flashtune.PagedKVCache` stores keys and values of growing sequences.
- `flashtune.record_calls` counts the calls of a program.
- `flashtune.set_batch_invariant` sets the default of `batch_invariant`.
- `flashtune.check_ranks` checks that ranks dispatch alike. `flashtune.table_hash` is a hash of their tables.

All errors are subclasses of `flashtune.FlashtuneError`.
Names are loaded at first use, so that `import flashtune` is fast for the command line.
"""

import importlib
from typing import TYPE_CHECKING

from flashtune.core import VERSION
from flashtune.core.errors import (
    BundleError,
    CacheFullError,
    FlashtuneError,
    KernelError,
    MachineError,
    ProblemError,
    StoreError,
    TableError,
    TargetError,
    UsageError,
    VerificationError,
)

if TYPE_CHECKING:
    from flashtune.api.attention import attention
    from flashtune.api.explain import Explanation, explain, explain_paged, explain_varlen
    from flashtune.api.flex_attention import explain_flex, flex_attention
    from flashtune.api.merge_states import merge_attention
    from flashtune.api.paged import attention_paged, plan_paged
    from flashtune.api.plan import Plan, plan
    from flashtune.api.ranks import check_ranks
    from flashtune.api.varlen import attention_varlen, plan_varlen
    from flashtune.core.block_mask import BlockMask
    from flashtune.core.notices import FlashtuneWarning
    from flashtune.dispatch.platform import table_hash
    from flashtune.kv_cache.cache import PagedKVCache
    from flashtune.request.invariance import set_batch_invariant
    from flashtune.request.quantization import quantize
    from flashtune.runtime.session import record_calls

__version__ = VERSION

__all__ = [
    "BlockMask",
    "BundleError",
    "CacheFullError",
    "Explanation",
    "FlashtuneError",
    "FlashtuneWarning",
    "KernelError",
    "MachineError",
    "PagedKVCache",
    "Plan",
    "ProblemError",
    "StoreError",
    "TableError",
    "TargetError",
    "UsageError",
    "VerificationError",
    "__version__",
    "attention",
    "attention_paged",
    "attention_varlen",
    "check_ranks",
    "explain",
    "explain_flex",
    "explain_paged",
    "explain_varlen",
    "flex_attention",
    "merge_attention",
    "plan",
    "plan_paged",
    "plan_varlen",
    "quantize",
    "record_calls",
    "set_batch_invariant",
    "table_hash",
]

_MODULES = {
    "flashtune.api.attention": ("attention",),
    "flashtune.api.explain": ("Explanation", "explain", "explain_paged", "explain_varlen"),
    "flashtune.api.flex_attention": ("explain_flex", "flex_attention"),
    "flashtune.api.merge_states": ("merge_attention",),
    "flashtune.api.paged": ("attention_paged", "plan_paged"),
    "flashtune.api.plan": ("Plan", "plan"),
    "flashtune.api.ranks": ("check_ranks",),
    "flashtune.api.varlen": ("attention_varlen", "plan_varlen"),
    "flashtune.core.block_mask": ("BlockMask",),
    "flashtune.core.notices": ("FlashtuneWarning",),
    "flashtune.dispatch.platform": ("table_hash",),
    "flashtune.kv_cache.cache": ("PagedKVCache",),
    "flashtune.runtime.session": ("record_calls",),
    "flashtune.request.invariance": ("set_batch_invariant",),
    "flashtune.request.quantization": ("quantize",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


if not TYPE_CHECKING:  # with __getattr__, type checkers accept misspelled names

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'flashtune' has no attribute {name!r}")
        value: object = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
