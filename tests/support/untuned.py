"""Untuned shapes, and the records that may serve them."""

from __future__ import annotations

import msgspec

from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.core.record import Record
from flashtune.core.target import find_target

TARGET = find_target("h200")


def shape(**changes: object) -> Problem:
    fields: dict[str, object] = {
        "dtype": Dtype.BF16,
        "head_dim": 128,
        "value_head_dim": 128,
        "heads": 16,
        "kv_heads": 16,
        "batch": 8,
        "seqlen_q": 2048,
        "seqlen_kv": 2048,
        "causal": Causal.BOTTOM_RIGHT,
    }
    return msgspec.convert(fields | changes, Problem, strict=False)


def anyone(record: Record) -> bool:
    return record.config is not None
