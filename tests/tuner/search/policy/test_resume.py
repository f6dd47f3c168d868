"""Which winners a search of a problem with features begins with."""

import math

import msgspec

from flashtune.core.problem import Problem
from flashtune.db.table import shipped_table
from flashtune.tuner.search.warm_start import OTHER_FEATURE, remoteness


def test_winners_of_the_same_features_are_nearer() -> None:
    table = shipped_table("nvidia-h200")
    assert table is not None
    plain = next(record for record in table.records if record.config)

    def remote(**changes: object) -> float:
        of: Problem = msgspec.structs.replace(plain.problem, **changes)
        return remoteness(msgspec.structs.replace(plain, problem=of), asked, plain.target)

    asked = msgspec.structs.replace(plain.problem, window_left=1023, sinks=True)
    assert remote(window_left=1023, sinks=True) == 0
    # How wide the window is decides the kernel, and little of which config is best.
    assert remote(window_left=127, sinks=True) == 0
    assert remote(window_left=1023) == OTHER_FEATURE
    assert remote() == 2 * OTHER_FEATURE
    assert remote(head_dim=plain.problem.head_dim * 2) == math.inf
