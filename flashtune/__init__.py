"""Generates, searches, proves and dispatches flash-attention kernels.

    import flashtune

    out = flashtune.attention(q, k, v, causal=True)

`flashtune.attention_varlen` takes packed sequences and `flashtune.attention_paged` keys and values in pages.
`flashtune.plan` resolves a call ahead of it, `flashtune.explain` says what would serve it,
`flashtune.quantize` makes 8-bit floats of inputs, `flashtune.PagedKVCache` keeps keys and values of growing
sequences, `flashtune.record_calls` counts what a program calls, and `flashtune.table_hash` is what ranks
compare. All errors are subclasses of `flashtune.FlashtuneError`.
Names are loaded when they are first used, so that importing the package, as the command line does,
costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashtune.api import attention
    from flashtune.errors import (
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
    from flashtune.explanation import Explanation, explain, explain_paged, explain_varlen
    from flashtune.kv_cache import PagedKVCache
    from flashtune.merging import merge_attention
    from flashtune.notices import FlashtuneWarning
    from flashtune.paged import attention_paged, plan_paged
    from flashtune.planning import Plan, plan
    from flashtune.quantization import quantize
    from flashtune.recording import record_calls
    from flashtune.tables import table_hash
    from flashtune.varlen import attention_varlen, plan_varlen

    __version__: str

__all__ = [
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
    "explain",
    "explain_paged",
    "explain_varlen",
    "merge_attention",
    "plan",
    "plan_paged",
    "plan_varlen",
    "quantize",
    "record_calls",
    "table_hash",
]

_HOMES = {
    **dict.fromkeys(
        (
            "CacheFullError",
            "FlashtuneError",
            "KernelError",
            "MachineError",
            "ProblemError",
            "StoreError",
            "TableError",
            "TargetError",
            "UsageError",
            "VerificationError",
        ),
        "flashtune.errors",
    ),
    "attention": "flashtune.api",
    "attention_paged": "flashtune.paged",
    "attention_varlen": "flashtune.varlen",
    "explain": "flashtune.explanation",
    "explain_paged": "flashtune.explanation",
    "explain_varlen": "flashtune.explanation",
    "Explanation": "flashtune.explanation",
    "FlashtuneWarning": "flashtune.notices",
    "PagedKVCache": "flashtune.kv_cache",
    "merge_attention": "flashtune.merging",
    "plan": "flashtune.planning",
    "plan_paged": "flashtune.paged",
    "plan_varlen": "flashtune.varlen",
    "Plan": "flashtune.planning",
    "quantize": "flashtune.quantization",
    "record_calls": "flashtune.recording",
    "table_hash": "flashtune.tables",
}


if not TYPE_CHECKING:  # a type checker would take this for leave to misspell names

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from flashtune.versions import package_version

            value: object = package_version()
        elif name in _HOMES:
            value = getattr(importlib.import_module(_HOMES[name]), name)
        else:
            raise AttributeError(f"module 'flashtune' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
