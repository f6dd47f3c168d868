"""A real search without a GPU, as a program: `predicted_search.py DATABASE`."""

import sys

from flashtune import testing
from flashtune.core.config import Axis, Space
from flashtune.core.target import find_target
from flashtune.db.store import open_store
from flashtune.templates.forward_q_outer.space import QOuterConfig
from flashtune.tuner.search.driver import run_search
from flashtune.tuner.search.request import Budget, SearchRequest

SIZE = 8


def main() -> None:
    axes = (
        Axis("block_m", (16, 32)),
        Axis("block_n", (16, 32)),
        Axis("num_warps", (1, 2)),
        Axis("num_stages", (1,)),
    )
    problem = testing.problem("heads=1,seqlen=64,head_dim=16,dtype=fp16")
    request = SearchRequest(
        problem=problem,
        target=find_target("a100"),
        budget=Budget(100, None, None),
        spaces=(("forward_q_outer", Space(QOuterConfig, axes)),),
        jobs=1,
    )
    with open_store(sys.argv[1]) as store:
        result = run_search(request, store)
    sys.stdout.write(f"{result.counts.reused} {result.counts.tried} {result.is_selected}\n")


if __name__ == "__main__":
    main()
