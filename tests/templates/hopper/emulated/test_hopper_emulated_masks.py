"""Tests of emulated Hopper kernels with masks and biases of pairs against a reference."""

from typing import Any

import pytest

from flashtune.core.problem import Bias
from tests.problems.hopper import a_config
from tests.problems.kernel_cases import HOPPER_MASKED
from tests.templates.hopper.emulated.test_hopper_emulated import CONFIGS, a_small, kernel_of, worst_error

LENGTHS = [(200, 300), (150, 420), (420, 150), (20, 700), (300, 602)]


@pytest.mark.slow
@pytest.mark.sampled(every=5)
@CONFIGS
@pytest.mark.parametrize("bias", [Bias.ADDITIVE, Bias.BOOLEAN])
@pytest.mark.parametrize("name", HOPPER_MASKED)
def test_masks_and_biases(config: dict[str, Any], bias: Bias, name: str) -> None:
    causal, features = HOPPER_MASKED[name]
    for queries, keys in LENGTHS:
        problem = a_small(causal, seqlen_q=queries, seqlen_kv=keys, batch=2, bias=bias, **features)
        chosen = a_config(problem, **config)
        worst = worst_error(kernel_of(problem, **config), problem, 3, config=chosen)
        assert worst < 1e-12, (queries, keys)
