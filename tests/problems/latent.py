"""Problems and kernels of the latent Hopper family."""

import functools
from typing import Any

from flashtune import testing
from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.problem import Problem
from flashtune.core.target import find_target
from flashtune.templates.decode_latent_hopper.space import LatentConfig
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render

FAMILY = find_family("decode_latent_hopper")
H200 = find_target("h200")


a_problem = functools.partial(
    testing.problem,
    "heads=128,kv_heads=1,seqlen_q=1,seqlen_kv=4096,head_dim=576,value_head_dim=512,dtype=bf16,causal,batch=64,mla",
)


def kernel_of(problem: Problem, lse: bool = False, **changes: Any) -> Kernel:
    return render(FAMILY, problem, a_config(**changes), Specialization(lse=lse))


def a_config(**changes: Any) -> LatentConfig:
    return LatentConfig(**{"num_warps": 4, "num_stages": 2, **changes})
