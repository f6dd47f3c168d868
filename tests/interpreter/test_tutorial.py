"""Tests of the tutorial's pictures and of its recorder of accesses. Its page runs in `test_code_blocks`."""

import pytest
import torch

from benchmarks import tutorial
from benchmarks.charts import PICTURES, is_current
from examples.tutorial.attention import FLASH_ATTENTION_1, FLASH_ATTENTION_2, modelled_elements, run


@pytest.mark.slow
def test_pictures_of_the_tutorial_are_current() -> None:
    pictures = tutorial.pictures().items()
    stale = [name for name, figure in pictures if not is_current(figure, PICTURES / f"{name}.svg")]
    assert not stale, "TRITON_INTERPRET=1 python -m benchmarks.tutorial"


@pytest.mark.slow
@pytest.mark.parametrize("family", [FLASH_ATTENTION_1, FLASH_ATTENTION_2])
@pytest.mark.parametrize("causal", [False, True])
def test_recorded_elements_equal_the_model(family: str, causal: bool) -> None:
    q, k, v = (torch.randn(16, 4) for _ in range(3))
    out, traffic = run(family, q, k, v, scale=0.5, block=4, causal=causal)
    scores = (0.5 * q @ k.T).masked_fill(torch.ones(16, 16).triu(1).bool() & causal, -torch.inf)
    torch.testing.assert_close(out, scores.softmax(-1) @ v)
    if not causal:
        assert traffic.total() == modelled_elements(family, q, k, v, block=4)
