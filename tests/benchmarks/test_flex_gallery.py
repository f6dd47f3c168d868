"""Tests of the functions of docs/flex-gallery.md, and of the script that runs attention-gym's."""

from pathlib import Path

import pytest
import torch

from benchmarks.kernels import gallery, gym
from benchmarks.saved import save
from flashtune.core.errors import UsageError
from flashtune.request.functions.tracing import trace

CPU = torch.device("cpu")


def test_the_gallery_has_functions_of_other_sizes(tmp_path: Path) -> None:
    found = gallery.functions(gallery.Sizes((8, 2), 512, 64), CPU)
    assert len(found) >= 10
    assert trace(None, found["Sliding window"][1]).ints == (128,)
    assert trace(*found["ALiBi"]).tables[0].shape == (8,)
    assert all(score or mask for score, mask in found.values())
    assert gallery.texts(tmp_path / "absent.json")["flex-gallery"] == gallery.NOT_MEASURED


def test_a_table_has_the_mean_and_the_worst(tmp_path: Path) -> None:
    path = tmp_path / "gallery.json"
    rows = [
        gallery.Row("Causal", 16, 16, length, width, 1.0, ms, 0.0)
        for length, width, ms in ((4096, 64, 4.0), (4096, 128, 1.0), (16384, 64, 3.0))
    ]
    save(path, rows)
    assert "| Causal | 2.00 | 3.00 | 1.00 |" in gallery.texts(path)["flex-gallery"]


def test_other_folders_have_no_masks_of_attention_gym(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no attn_gym/masks"):
        gym.load(tmp_path)
