"""Untuned shapes, and the records that may serve them."""

import functools

from flashtune import testing
from flashtune.core.record import Record
from flashtune.core.target import find_target

TARGET = find_target("h200")


shape = functools.partial(testing.problem, "heads=16,seqlen=2048,head_dim=128,dtype=bf16,causal,batch=8")


def anyone(record: Record) -> bool:
    return record.config is not None
