"""Arguments of calls in float64, which are served without a GPU."""

from typing import Any

import torch

from tests.problems.features import KEYS, QUERIES, paged, starts


def varlen_arguments(**changes: Any) -> dict[str, Any]:
    """Arguments of a call with packed sequences in float64, by name."""
    q, k = torch.randn(sum(QUERIES), 4, 32).double(), torch.randn(sum(KEYS), 2, 32).double()
    lengths = {"cu_seqlens_q": starts(QUERIES), "cu_seqlens_k": starts(KEYS)}
    longest = {"max_seqlen_q": max(QUERIES), "max_seqlen_k": max(KEYS)}
    return {"q": q, "k": k, "v": k, **lengths, **longest, **changes}


def paged_arguments(**changes: Any) -> dict[str, Any]:
    """Arguments of a call with a cache in pages in float64, by name."""
    k, v, table, lengths = paged()
    cache = {"k_cache": k.double(), "v_cache": v.double(), "block_table": table, "kv_lengths": lengths}
    return {"q": torch.randn(len(KEYS), 4, 32).double(), **cache, **changes}
