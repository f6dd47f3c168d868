"""Tests of problems with functions that the command line names."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch.nn.attention import flex_attention as flex

from flashtune.core.errors import ProblemError, UsageError
from flashtune.core.problem import Problem
from flashtune.request.functions.block_lists import unwritten_lists
from flashtune.request.functions.call import flex_call
from flashtune.request.read_call import read_call
from flashtune.tuner.cli import main
from flashtune.tuner.workloads.functions import imported, with_functions
from flashtune.tuner.workloads.shapes import parse_shape

TEXT = """
import torch

TABLE = torch.rand(8)

class Scores:
    @staticmethod
    def alibi(s, b, h, q, k):
        return s + TABLE[h] * (k - q)

def window(b, h, q, k):
    return (q >= k) & (q - k < 99)

def untraceable(s, b, h, q, k):
    return torch.lgamma(s)

def same(s, b, h, q, k):
    return s
"""
SHAPE = "heads=4,kv_heads=2,seqlen=256,head_dim=64"


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_masks.py").write_text(TEXT)
    (tmp_path / "users_failing.py").write_text("raise RuntimeError('no GPU')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def problem(score: str | None, mask: str | None, shape: str = SHAPE) -> Problem:
    (found,) = with_functions(parse_shape(shape), score, mask)
    return found


def test_the_problem_is_that_of_a_call() -> None:
    score, mask = "users_masks:Scores.alibi", "users_masks:window"
    functions = imported("--score-mod", score), imported("--mask-mod", mask)
    q, k = (torch.empty(1, heads, 256, 64, dtype=torch.bfloat16) for heads in (4, 2))
    for heads, shape in ((None, SHAPE), (4, f"{SHAPE},block_mask=128")):
        block_mask = flex.create_block_mask(functions[1], None, heads, 256, 256, device="cpu")
        call = flex_call(q, k, k, functions[0], block_mask, None, True, False, unwritten_lists)
        assert problem(score, mask, shape).key == read_call(call).problem.key
        recognised = flex_call(q, k, k, None, block_mask, None, True, False, unwritten_lists)
    assert problem(None, mask).key == read_call(recognised).problem.key
    assert problem(None, mask).window_left == 98
    call = flex_call(q, k, k, functions[0], None, None, True, False, unwritten_lists)
    assert problem(score, None).key == read_call(call).problem.key


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("users_masks", "pass module:function"),
        ("users_masks:absent", "has no function 'absent'"),
        ("users_masks:TABLE", "has no function 'TABLE'"),
        ("users_absent:score", "'users_absent' cannot be imported"),
        ("users_failing:score", "cannot be imported.*no GPU"),
        ("users_masks:same", "change no score"),
    ],
)
def test_wrong_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        problem(name, None)


def test_other_functions_are_refused() -> None:
    with pytest.raises(ProblemError, match="lgamma at users_masks"):
        problem("users_masks:untraceable", None)
    shape = f"{SHAPE},functions=key.query.less_equal/0/1:-1:2:"
    with pytest.raises(UsageError, match="a shape has functions"):
        problem("users_masks:Scores.alibi", None, shape)


def test_a_dry_run_of_a_search_names_the_problem() -> None:
    options = ["--score-mod", "users_masks:Scores.alibi", "--shape", SHAPE, "--target", "h200", "--dry-run"]
    result = CliRunner().invoke(main, ["search", *options])
    assert result.exit_code == 0, result.output
    assert f"functions-{problem('users_masks:Scores.alibi', None).functions.digest}" in result.output
