"""Kernels for the measurement of first uses: all families, types, features and both passes."""

import msgspec

from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import Problem
from flashtune.core.record import Record
from flashtune.core.target import Target
from flashtune.dispatch.lookup import select
from flashtune.dispatch.tables import tuned_records
from flashtune.tuner.workloads.shapes import parse_shape


class Case(msgspec.Struct, frozen=True):
    """A kernel."""

    shape: str  # In the syntax of `flashtune search`.
    alignment: Alignment = Alignment.SIXTEEN  # Of the strides; TMA cannot address 1.
    fresh: bool = False  # Whether it is also measured in separate processes.

    @property
    def problem(self) -> Problem:
        """The problem."""
        return parse_shape(self.shape)[0]

    @property
    def assumed(self) -> Specialization:
        """Of the tensors, with a log-sum-exp or its gradient."""
        return Specialization(alignment=self.alignment, lse=True)

    def record(self, target: Target) -> Record:
        """The generated kernel that serves it."""
        tables = tuned_records(target.name)
        return select(self.problem, target, tables, self.assumed, generated=True).record


CASES = (
    Case("heads=16,seqlen=2048,head_dim=128,batch=8,causal", fresh=True),
    Case("heads=16,seqlen=2048,head_dim=128,batch=8,causal", Alignment.ANY, fresh=True),
    Case("heads=64,kv_heads=8,seqlen=8192,head_dim=128,dtype=e4m3,causal", fresh=True),
    Case("heads=12,seqlen=1024,head_dim=64,batch=4,dtype=fp32,causal"),
    Case("heads=8,seqlen=65536,head_dim=128,causal"),
    Case("heads=8,seqlen=4096,head_dim=256,batch=4,dtype=fp16"),
    Case("heads=32,kv_heads=8,seqlen=131072,head_dim=64"),
    Case("heads=32,seqlen=512,head_dim=64,batch=32"),
    Case("heads=32,seqlen=512,head_dim=64,batch=32,causal"),
    Case("heads=8,seqlen=16384,head_dim=256,causal"),
    Case("heads=8,seqlen=2048,head_dim=64,dtype=fp16,causal", Alignment.ANY),
    Case("heads=16,seqlen=1024,head_dim=96,batch=2,causal"),
    Case("heads=16,seqlen=1024,head_dim=40,batch=2,dtype=fp16", Alignment.EIGHT),
    Case("heads=16,seqlen=1024,head_dim=192,value_head_dim=128,batch=2,causal"),
    Case("heads=32,kv_heads=8,seqlen_q=1,seqlen_kv=8192,head_dim=128,batch=16"),
    Case("heads=32,kv_heads=1,seqlen_q=16,seqlen_kv=8192,head_dim=128,causal"),
    Case("heads=16,seqlen_q=1000,seqlen_kv=5000,head_dim=128,causal=top_left"),
    Case("heads=8,seqlen=2048,head_dim=256", Alignment.ANY),
    Case("heads=8,seqlen=2048,head_dim=256,dtype=fp32"),
    Case("heads=64,kv_heads=8,seqlen=4096,head_dim=64,dtype=e4m3"),
    Case("heads=32,kv_heads=8,seqlen=8192,head_dim=128,causal,window=1023", fresh=True),
    Case("heads=16,kv_heads=8,seqlen=4096,head_dim=256,causal,window=1023,softcap", fresh=True),
    Case("heads=32,seqlen=2048,head_dim=128,causal,alibi"),
    Case("heads=16,seqlen=1024,head_dim=64,batch=4,bias=additive", fresh=True),
    Case("heads=16,seqlen=4096,head_dim=128,causal,block_mask=64"),
    Case("heads=64,kv_heads=8,seqlen=4096,head_dim=64,causal,sinks"),
    Case("heads=16,kv_heads=4,seqlen=2048,head_dim=128,batch=4,packed=4096,causal", fresh=True),
    Case("heads=16,seqlen=2048,head_dim=64,batch=4,causal,dropout", fresh=True),
    Case("heads=32,kv_heads=8,seqlen_q=1,seqlen_kv=8192,head_dim=128,batch=16,page_size=16", fresh=True),
    Case(
        "heads=32,kv_heads=8,seqlen_q=1,seqlen_kv=8192,head_dim=128,batch=16,page_size=64,kv_dtype=e4m3",
        fresh=True,
    ),
    Case(
        "heads=128,kv_heads=1,seqlen_q=1,seqlen_kv=4096,head_dim=576,value_head_dim=512,page_size=64,mla",
        fresh=True,
    ),
    Case("heads=16,seqlen=2048,head_dim=128,batch=8,causal,backward", fresh=True),
    Case("heads=32,seqlen=2048,head_dim=64,batch=8,backward"),
    Case("heads=8,seqlen=4096,head_dim=256,batch=4,causal,backward"),
    Case("heads=16,seqlen=2048,head_dim=128,batch=8,causal,backward,deterministic"),
    Case("heads=12,seqlen=1024,head_dim=64,batch=4,dtype=fp32,causal,backward", fresh=True),
    Case("heads=32,kv_heads=8,seqlen=4096,head_dim=128,causal,window=1023,backward", fresh=True),
    Case("heads=16,seqlen=1024,head_dim=64,batch=4,bias=additive,backward", fresh=True),
    Case(
        "heads=16,kv_heads=4,seqlen=2048,head_dim=128,batch=4,packed=4096,causal,dropout,backward",
        fresh=True,
    ),
)
