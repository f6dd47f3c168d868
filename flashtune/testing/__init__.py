"""Helpers for tests of kernels and integrations against the float64 reference; see docs/testing.md.

    from flashtune import testing

    problem = testing.problem("heads=8,kv_heads=2,seqlen=512,head_dim=128,causal")
    inputs = testing.tensors(problem)
    testing.close(my_attention(inputs.q, inputs.k, inputs.v), testing.reference(inputs).out)

Inputs, reference and tolerances are those of `flashtune.verification`. Nothing here needs pytest.
"""

from flashtune.testing.fake_gpu import fake_gpu
from flashtune.testing.inputs import Inputs, attention_inputs, paged_inputs, problem, tensors, varlen_inputs
from flashtune.testing.reference import Expected, Reference, close, reference

__all__ = [
    "Expected",
    "Inputs",
    "Reference",
    "attention_inputs",
    "close",
    "fake_gpu",
    "paged_inputs",
    "problem",
    "reference",
    "tensors",
    "varlen_inputs",
]
