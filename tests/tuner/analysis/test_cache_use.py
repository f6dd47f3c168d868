"""Tests of the simulation of caches by traces of requests."""

from pathlib import Path

import pytest

from flashtune.core.errors import UsageError
from flashtune.tuner.analysis.cache_use import Request, cache_use, read_trace, simulate, synthetic_trace

# Two requests of 6 and 4 tokens in the end.
TWO = (Request(0.0, 4, 2), Request(0.0, 3, 1))


def test_use_is_that_of_hand() -> None:
    # Step 1: 5 and 4 tokens in 2 + 1 pages of 4. Step 2: 6 tokens in 2 pages.
    use = simulate(TWO, cache_tokens=16, page_size=4, step=1.0)
    assert use.utilisation == pytest.approx((9 / 12 + 6 / 8) / 2)
    assert (use.most, use.mean, use.seconds, use.restarts) == (2, 1.5, 2.0, 0)


def test_contiguous_cache_has_a_page_of_the_longest_request_for_each() -> None:
    charts = cache_use("two", TWO, 11, (1,), 1.0)
    share, at_once, ratios, seconds, _ = charts
    assert share.positions == ("contiguous", "pages of 1")
    # One slot of 6 tokens: 5 and 6 tokens of the first request, then 4 of the second.
    assert share.lines["utilisation"] == pytest.approx((100 * (5 / 6 + 6 / 6 + 4 / 6) / 3, 100))
    assert at_once.lines["at most"] == (1, 2)
    assert ratios.lines["at most"] == (1, 2)
    assert seconds.lines["time"] == (3.0, 2.0)
    assert share.notes == {"requests": 2, "longest, tokens": 6, "capacity, tokens": 11}


def test_newest_request_gives_up_its_pages() -> None:
    # Two pages of 4 hold both prompts, and the older request needs a second page for its fifth token.
    use = simulate((Request(0.0, 4, 4), Request(0.0, 3, 5)), cache_tokens=12, page_size=4, step=1.0)
    # The second one needs its second page when no page is left.
    assert use.restarts == 1
    assert use.most == 2


def test_requests_wait_for_their_arrival() -> None:
    use = simulate((Request(5.0, 1, 1), Request(100.0, 1, 1)), cache_tokens=16, page_size=16, step=1.0)
    assert (use.seconds, use.most, use.mean) == (101.0, 1, 1.0)


def test_synthetic_trace_is_seeded() -> None:
    first, again, other = (synthetic_trace(500, 10.0, 100, 50, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    prompts = sorted(request.prompt_tokens for request in first)
    assert prompts[250] == pytest.approx(100, rel=0.15)
    assert first[-1].arrival == pytest.approx(50, rel=0.2)
    assert list(first) == sorted(first, key=lambda request: request.arrival)


def test_trace_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival": 2.5, "prompt_tokens": 3, "generated_tokens": 1}\n\n'
        '{"arrival": 0, "prompt_tokens": 5, "generated_tokens": 2}\n'
    )
    assert read_trace(path) == (Request(0.0, 5, 2), Request(2.5, 3, 1))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has 0 requests"),
        ("[1]", "is no trace"),
        ('{"arrival": 0, "prompt_tokens": 0, "generated_tokens": 1}', "is no trace"),
        ('{"arrival": -1, "prompt_tokens": 1, "generated_tokens": 1}', "is no trace"),
        ('{"arrival": 0, "prompt_tokens": 1, "generated_tokens": 1, "more": 1}', "`more`"),
        ('{"arrival": 1e999, "prompt_tokens": 1, "generated_tokens": 1}', "is no trace"),
        ('{"arrival": 0, "prompt_tokens": 1}', "generated_tokens"),
        ("\xff", "is no trace"),
    ],
)
def test_bad_traces_are_refused_in_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=words):
        read_trace(path)


def test_request_that_never_fits_is_refused() -> None:
    with pytest.raises(UsageError, match="pass more --cache-tokens"):
        simulate(TWO, cache_tokens=5, page_size=1, step=1.0)
