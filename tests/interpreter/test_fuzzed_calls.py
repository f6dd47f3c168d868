"""Fuzzed calls in the interpreter: served, or refused in one sentence."""

from collections.abc import Callable

import pytest
import torch

from tests.problems.fuzzed_calls import check_fuzzed_calls

pytestmark = pytest.mark.usefixtures("fresh_runtime")


@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")
def test_random_calls_are_served_or_refused_in_one_sentence(fuzz_count: Callable[[int, int], int]) -> None:
    count = fuzz_count(30, 600)
    served = check_fuzzed_calls(count, (torch.float32, torch.float32, torch.bfloat16))
    assert count / 20 < served < count / 2
