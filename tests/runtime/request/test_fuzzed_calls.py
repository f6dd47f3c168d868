"""Fuzzed calls on the CPU without the interpreter: served in float64, or refused in one sentence."""

from collections.abc import Callable

import pytest
import torch

from tests.problems.fuzzed_calls import check_fuzzed_calls


@pytest.mark.filterwarnings("ignore")
def test_random_calls_are_served_or_refused_in_one_sentence(fuzz_count: Callable[[int, int], int]) -> None:
    count = fuzz_count(100, 6000)
    served = check_fuzzed_calls(count, (torch.float64, torch.float32, torch.bfloat16))
    assert count / 50 < served < count / 2
