"""Cache of prepared cases for the next candidates of a search."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import msgspec

from flashtune.core.problem import Bias
from flashtune.verification.cases import Case

SMALL_CACHED = 256
MIDDLE_CACHED = 8
MIDDLE_ELEMENTS = 2**22
LARGE_CACHED = 2
LARGE_ELEMENTS = 2**24

Made = TypeVar("Made")


class CaseCache(Generic[Made]):
    """Prepares cases and caches recent results: many small ones and few large ones."""

    def __init__(self, prepare: Callable[..., Made]) -> None:
        self._prepare = prepare
        self._small = functools.lru_cache(maxsize=SMALL_CACHED)(prepare)
        self._middle = functools.lru_cache(maxsize=MIDDLE_CACHED)(prepare)
        self._large = functools.lru_cache(maxsize=LARGE_CACHED)(prepare)

    def __call__(self, case: Case, *rest: Hashable) -> Made:
        """Returns the result of `prepare` for the same arguments, possibly from the cache."""
        # The tensors do not depend on the number of launches.
        once = msgspec.structs.replace(case, repeats=1)
        if case.far is not None:
            return self._prepare(once, *rest)
        problem = case.problem
        elements = problem.minimal_bytes() // problem.dtype.itemsize
        if problem.bias is not Bias.NONE:
            elements += problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_kv
        if elements > LARGE_ELEMENTS:
            return self._large(once, *rest)
        return (self._middle if elements > MIDDLE_ELEMENTS else self._small)(once, *rest)

    def forget(self) -> None:
        """Clears the cache, because a wrong kernel may have written anywhere."""
        for cached in (self._small, self._middle, self._large):
            cached.cache_clear()
