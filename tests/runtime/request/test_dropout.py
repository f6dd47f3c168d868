"""Tests that draws of dropout's generator look independent of each other.

Seeds are fixed, so that a test that passes once always does. Bounds are those of as many normal variables as
a test looks at: independent ones would pass with a probability of about 0.99.
"""

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flashtune.request.dropout import draw_seed, kept_weights, threshold

HEADS, ROWS, KEYS = 6, 512, 512
SEEDS = (0, 1, 2, 2**31, 2**32, -1, 0x1234_5678_9ABC_DEF0)
SHARES = (0.01, 0.1, 0.5, 0.9)
NEAR = [(rows, keys) for rows in range(4) for keys in range(-3, 4) if (rows, keys) > (0, 0)]
# Lags where tiles, lanes and powers of two might show.
FAR = [(0, 8), (0, 16), (0, 64), (0, 128), (0, 233), (8, 0), (64, 0), (128, 0), (64, 64), (128, -128), (8, 8)]


def standardized(seed: int, dropout: float, rows: int = ROWS, keys: int = KEYS) -> Tensor:
    """Returns dropped weights as variables of mean zero and variance one: float64 [heads, rows, keys]."""
    stay = kept_weights(torch.tensor([seed]), torch.arange(HEADS), torch.arange(rows), keys, dropout)
    return ((~stay).double() - dropout) / math.sqrt(dropout * (1 - dropout))


def z_score(products: Tensor) -> float:
    """How far the mean of independent variables of variance one is from zero."""
    return float(products.mean()) * math.sqrt(products.numel())


def lagged(drawn: Tensor, rows: int, keys: int) -> tuple[Tensor, Tensor]:
    """Returns a field and the same field so many rows and keys further on, cut to one size."""
    first, last = max(0, -keys), min(KEYS, KEYS - keys)
    return drawn[:, : ROWS - rows, first:last], drawn[:, rows:, first + keys : last + keys]


@pytest.mark.slow
@pytest.mark.parametrize("dropout", SHARES)
def test_means_and_variances(dropout: float) -> None:
    for seed in SEEDS:
        drawn = standardized(seed, dropout)
        assert abs(z_score(drawn)) < 4.0
        for axis, count in ((2, KEYS), (1, ROWS)):
            sums = drawn.sum(axis) / math.sqrt(count)
            assert sums.abs().max() < (6.0 if dropout > 0.05 else 9.0)
            # The mean square of n normal variables varies by sqrt(2 / n), a little more where few fall.
            excess = (1 / (dropout * (1 - dropout)) - 6) / count
            assert abs(sums.square().mean() - 1) < 4.5 * math.sqrt((2 + excess) / sums.numel())


def pairs(dropout: float) -> Iterator[tuple[object, Tensor, Tensor]]:
    """Yields pairs of fields that must not correlate: neighbours and lags, heads, and seeds."""
    fields = [standardized(seed, dropout) for seed in SEEDS]
    for seed, drawn in zip(SEEDS[:4], fields, strict=False):
        for lag in (*NEAR, *FAR):
            yield (seed, lag), *lagged(drawn, *lag)
        for heads in itertools.combinations(range(HEADS), 2):
            first, other = drawn[heads[0]], drawn[heads[1]]
            yield (seed, heads), first, other
            # Nor the rows of one and the next row, or the next key, of the other.
            yield (seed, heads, "next row"), first[1:], other[:-1]
            yield (seed, heads, "next key"), first[:, 1:], other[:, :-1]
    for seeds in itertools.combinations(range(len(SEEDS)), 2):
        yield seeds, fields[seeds[0]], fields[seeds[1]]


@pytest.mark.slow
@pytest.mark.parametrize("dropout", SHARES)
def test_neighbours_heads_and_seeds_are_uncorrelated(dropout: float) -> None:
    for pair, first, other in pairs(dropout):
        assert abs(z_score(first * other)) < 4.5, pair


@pytest.mark.slow
@pytest.mark.parametrize("lag", [(1, 1), (2, 3), (8, 8), (64, 32)], ids=str)
def test_patterns_of_four(lag: tuple[int, int]) -> None:
    """Chi-square of the 16 patterns at the corners of squares, each corner in one square alone."""
    rows, keys = lag
    for seed in SEEDS:
        fallen = standardized(seed, 0.5) > 0
        whole = fallen[:, : ROWS // (2 * rows) * 2 * rows, : KEYS // (2 * keys) * 2 * keys]
        blocks = whole.unflatten(1, (-1, 2, rows)).unflatten(4, (-1, 2, keys))
        corners = [blocks[:, :, i, :, :, j] for i in (0, 1) for j in (0, 1)]
        patterns = torch.stack([corner.long() << index for index, corner in enumerate(corners)]).sum(0)
        counts = torch.bincount(patterns.flatten(), minlength=16).double()
        expected = counts.sum() / 16
        # Of 15 degrees of freedom: one in 100,000 is larger.
        assert ((counts - expected).square() / expected).sum() < 50.5


@pytest.mark.slow
def test_long_rows_do_not_repeat() -> None:
    """All lags of rows of 64k keys at once, by a Fourier transform."""
    keys, dropout = 2**16, 0.1
    stay = kept_weights(torch.tensor([11]), torch.arange(2), torch.arange(32), keys, dropout)
    drawn = ((~stay).double() - dropout) / math.sqrt(dropout * (1 - dropout))
    spectrum = torch.fft.rfft(drawn.flatten(0, 1), n=2 * keys)
    sums = torch.fft.irfft(spectrum.abs().square().sum(0))[1 : keys - 1000]
    lags = torch.arange(1, keys - 1000)
    scores = sums / (64 * (keys - lags)).sqrt()
    assert scores.abs().max() < 5.5
    assert abs(scores.square().mean() - 1) < 0.03


@pytest.mark.slow
def test_pairs_of_rows_and_of_keys() -> None:
    """The largest correlations of any two, and their mean square, are those of independent ones."""
    drawn = standardized(5, 0.5, 1024, 1024)[0]
    for field in (drawn, drawn.T):
        scores = (field @ field.T / math.sqrt(1024))[tuple(torch.triu_indices(1024, 1024, 1))]
        assert scores.abs().max() < 6.2
        assert abs(scores.square().mean() - 1) < 0.01


def test_dropout_rates() -> None:
    assert threshold(0.5) == 2**31
    assert threshold(1 - 2.0**-24) == 2**32 - 2**8
    numbers = (torch.tensor([1]), torch.arange(1), torch.arange(64), 512)
    assert kept_weights(*numbers, 0.0).all()
    # More falls as the share grows, and what fell stays fallen.
    shares = [kept_weights(*numbers, dropout) for dropout in (0.1, 0.4, 0.9, 1 - 2.0**-24)]
    for more, less in itertools.pairwise(shares):
        assert not (less & ~more).any()
        assert less.sum() < more.sum()


def test_seeds_come_from_the_default_generator() -> None:
    torch.manual_seed(3)
    first, second = (draw_seed(torch.device("cpu")) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(draw_seed(torch.device("cpu")), first)
    assert not torch.equal(first, second)
    assert first.dtype is torch.int64
    assert first.shape == (1,)
