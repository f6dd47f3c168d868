"""Use of contiguous and of paged caches by a trace of requests, which is read from a file or synthetic."""

import math
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from flashtune.core.errors import UsageError
from flashtune.core.files import read_bounded
from flashtune.kv_cache.block_manager import Ledger
from flashtune.tuner.analysis.charts import Chart

MAX_TRACE_BYTES, MAX_TOKENS, MAX_REQUESTS = 2**26, 2**20, 100_000
# Standard deviation of the logarithm of synthetic lengths.
SPREAD = 0.8


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a trace."""

    arrival: Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # Seconds after the start of the trace.
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    generated_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]

    @property
    def tokens(self) -> int:
        """Tokens in the cache at the end."""
        return self.prompt_tokens + self.generated_tokens


class Use(NamedTuple):
    """The use of a cache by a trace. Means are over all steps with a request."""

    utilisation: float  # Mean share of the allocated memory with tokens.
    most: int  # Largest number of requests in the cache at once.
    mean: float  # Its mean.
    seconds: float  # Time until the last request ended.
    restarts: int  # Requests that gave up their pages to older ones.


def read_trace(path: Path) -> tuple[Request, ...]:
    """Returns the requests of a file of JSON lines, in order of their arrival."""
    try:
        requests = msgspec.json.Decoder(Request).decode_lines(read_bounded(path, MAX_TRACE_BYTES))
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(
            f"{path} is no trace: {error}; write a JSON object with arrival, prompt_tokens and "
            "generated_tokens on each line"
        ) from error
    if not 0 < len(requests) <= MAX_REQUESTS:
        raise UsageError(f"{path} has {len(requests):,} requests: pass a trace of 1 to {MAX_REQUESTS:,}")
    return tuple(sorted(requests, key=lambda request: request.arrival))


def synthetic_trace(
    requests: int, rate: float, prompt: int, generated: int, seed: int
) -> tuple[Request, ...]:
    """Returns requests with `rate` arrivals a second, exponential gaps and log-normal lengths.

    `prompt` and `generated` are medians of lengths. Equal arguments give equal requests.
    """
    generator = random.Random(seed)  # noqa: S311 - not for secrets
    arrival, trace = 0.0, []
    for _ in range(requests):
        arrival += generator.expovariate(rate)
        lengths = (generator.lognormvariate(math.log(median), SPREAD) for median in (prompt, generated))
        trace.append(Request(arrival, *(min(max(round(length), 1), MAX_TOKENS) for length in lengths)))
    return tuple(trace)


def simulate(trace: Sequence[Request], cache_tokens: int, page_size: int, step: float) -> Use:
    """Returns the use of a cache for `cache_tokens` tokens, in pages of `page_size`.

    A request enters in order of arrival if its prompt and its first token fit. Each step of `step` seconds
    then adds one token to each request. If pages run out, the newest request gives up its own. It enters
    again with all its tokens as a prompt. A contiguous cache has pages of the length of the longest request.
    """
    longest = max(request.tokens for request in trace)
    if -(-longest // page_size) > cache_tokens // page_size:
        raise UsageError(
            f"a request of {longest:,} tokens does not fit into {cache_tokens:,} tokens in pages of "
            f"{page_size:,}: pass more --cache-tokens"
        )
    ledger = Ledger(cache_tokens // page_size, page_size)
    coming, waiting = deque(trace), deque[Request]()
    running: dict[int, Request] = {}
    lengths: dict[int, int] = {}
    clock, shares, counts, restarts = 0.0, [], [], 0
    while coming or waiting or running:
        if not (waiting or running):
            clock = max(clock, coming[0].arrival)
        while coming and coming[0].arrival <= clock:
            waiting.append(coming.popleft())
        while waiting and waiting[0].prompt_tokens // page_size < ledger.free_pages:
            request, sequence = waiting.popleft(), ledger.add()
            ledger.commit(ledger.plan([sequence], [request.prompt_tokens]))
            running[sequence], lengths[sequence] = request, request.prompt_tokens
        # Each sequence with a full last page needs another one.
        while sum(length % page_size == 0 for length in lengths.values()) > ledger.free_pages:
            newest = max(running)
            arrival, length, tokens = running[newest].arrival, lengths.pop(newest), running.pop(newest).tokens
            waiting.appendleft(Request(arrival, length, tokens - length))
            ledger.free(newest)
            restarts += 1
        ledger.commit(ledger.plan([*running], [1] * len(running)))
        lengths = {one: length + 1 for one, length in lengths.items()}
        shares.append(sum(lengths.values()) / ((ledger.pages - ledger.free_pages) * page_size))
        counts.append(len(running))
        clock += step
        for one in [one for one, request in running.items() if lengths[one] == request.tokens]:
            ledger.free(one)
            del running[one], lengths[one]
    return Use(sum(shares) / len(shares), max(counts), sum(counts) / len(counts), clock, restarts)


def cache_use(
    name: str, trace: Sequence[Request], cache_tokens: int, page_sizes: Sequence[int], step: float
) -> tuple[Chart, ...]:
    """Returns charts of the use of a contiguous cache, and of caches with pages of each size."""
    longest = max(request.tokens for request in trace)
    uses = [simulate(trace, cache_tokens, size, step) for size in (longest, *page_sizes)]
    share = {"utilisation": tuple(100 * use.utilisation for use in uses)}
    at_once = {"at most": tuple(use.most for use in uses), "mean": tuple(use.mean for use in uses)}
    ratios = {line: tuple(value / values[0] for value in values) for line, values in at_once.items()}
    notes = {"requests": len(trace), "longest, tokens": longest, "capacity, tokens": cache_tokens}
    return tuple(
        Chart(
            title=f"{title}, {name}",
            across="cache",
            positions=("contiguous", *(f"pages of {size}" for size in page_sizes)),
            unit=unit,
            lines=lines,
            log=False,
            notes=notes if lines is share else {},
        )
        for title, unit, lines in (
            ("Utilisation", "% of allocated memory", share),
            ("Requests in the cache", "requests", at_once),
            ("Requests over those of the contiguous cache", "times", ratios),
            ("Time until all requests ended", "s", {"time": tuple(use.seconds for use in uses)}),
            ("Requests that gave up pages", "requests", {"restarts": tuple(use.restarts for use in uses)}),
        )
    )
