"""Tests of the divisions and words of mask functions of Hopper kernels, in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashtune.core.expressions.nodes import Op
from flashtune.templates.common.args.function_lines import HELPERS
from flashtune.templates.common.args.gluon_words import CALLED

KERNEL = '''
import sys

import torch
import triton
import triton.language as tl

{helpers}


@triton.jit
def divide(out, words, start, divisor, least, greatest, WIDTH: tl.constexpr):
    """Writes quotients of the places of a block, and words of those with a remainder within an interval."""
    reciprocal = reciprocal_of(divisor, WIDTH)
    steps = tl.arange(0, WIDTH)
    tl.store(out + steps, divide_places(start, steps & 6, steps & -7, divisor, reciprocal))
    threads = 2 * tl.arange(0, 4)
    found = places_with(least, greatest, start, threads, divisor, reciprocal, WIDTH)
    tl.store(words + tl.arange(0, 4), found)
    first, after = places_between(least, greatest, divisor)
    found = places_from(first - start - threads) & (places_from(after - start - threads) ^ -1)
    tl.store(words + 4 + tl.arange(0, 4), found)


def visible(words):
    places = torch.arange(128)
    return words[places % 8 // 2].long() >> (places // 8 * 2 + places % 2) & 1


LARGE = [2**31 - 1, -(2**31), 1 - 2**31, 2**30, -(2**30), 2**30 + 77, 2**31 - 100]
torch.manual_seed(0)
for trial in range(int(sys.argv[1])):
    size = 2 ** int(torch.randint(1, 32, ()))
    divisor = int(torch.randint(-size, size, ())) or 1
    if trial < 5 * len(LARGE):
        divisor = LARGE[trial % len(LARGE)]
    elif trial < 140:
        divisor = trial // 2 - 16
        divisor = -divisor if trial % 2 else divisor
    start = int(torch.randint(0, 2 ** int(torch.randint(8, 31, ())), ())) // 128 * 128
    if trial % 5 == 0:
        start = 0
    places = start + torch.arange(128)
    for values, kind in ((places % divisor, 0), (places // divisor, 1)):
        middle = int(values[int(torch.randint(0, 128, ()))])
        reach = int(torch.randint(0, 2 ** int(torch.randint(1, 31, ())), ())) - 1
        least, greatest = max(middle - reach, 1 - 2**31), min(middle + reach, 2**31 - 1)
        if trial % 7 == 0:
            # An id that no place has.
            least = greatest = LARGE[trial % 2]
        out, words = torch.zeros(128, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
        divide[(1,)](out, words, start, divisor, least, greatest, 128)
        assert torch.equal(out.long(), places // divisor), (start, divisor)
        expected = ((least <= values) & (values <= greatest)).long()
        found = visible(words[4 * kind :])
        assert torch.equal(found, expected), (kind, start, divisor, least, greatest)
print("equal")
'''


@pytest.mark.slow
def test_quotients_and_remainders_are_those_of_torch(tmp_path: Path) -> None:
    texts = [HELPERS[Op.FLOOR_DIVIDE], *CALLED.values()]
    helpers = "\n\n".join(text.replace("gluon.jit", "triton.jit").replace("gl.", "tl.") for text in texts)
    path = tmp_path / "words.py"
    path.write_text(KERNEL.replace("{helpers}", helpers), encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, str(path), "180"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout == "equal\n", ran.stderr[-2000:]
