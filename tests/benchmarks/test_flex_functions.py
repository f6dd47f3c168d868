"""Tests of the functions of `benchmarks.kernels.flex`, and of the script that runs attention-gym's."""

import time
from pathlib import Path

import pytest
import torch

import flashtune
from benchmarks.kernels import flex, flex_gradients, gym
from flashtune.core.errors import UsageError
from flashtune.request.functions.tracing import trace

CPU = torch.device("cpu")


def test_all_functions_can_be_traced() -> None:
    found = flex.gallery(2, 8, 512, CPU)
    assert len(found) >= 10
    assert all(trace(own.score, own.mask).functions for own in found.values())


def test_gradients_are_measured_of_all_functions_of_the_gallery() -> None:
    found = flex_gradients.cases(2, 8, 512, CPU)
    assert flex.gallery(2, 8, 512, CPU).keys() <= found.keys()
    assert all(tensor.requires_grad for own in found.values() for tensor in own.captured)
    assert all(trace(own.score, own.mask).functions for own in found.values())


def test_the_first_call_of_both_passes_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def passes(function: object, case: object, tensors: list[torch.Tensor]) -> object:
        def run() -> list[torch.Tensor]:
            time.sleep(0.05 * (function is flashtune.flex_attention))
            return tensors

        run()
        return run

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(flex_gradients, "backward", passes)
    checked = flex_gradients.check("gated scores", 2, 2, 16, CPU, small=False, backend=flex.AUTO)
    assert checked.first_s[0] >= 0.1 > checked.first_s[1] > sum(checked.errors) == 0.0


def test_other_folders_have_no_masks_of_attention_gym(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no attn_gym/masks"):
        gym.load(tmp_path)
