"""Comparison of the ranks of a distributed job, which must select the same kernels."""

from collections import Counter
from typing import Any

import torch.distributed as dist

from flashtune.core.errors import FlashtuneError, MachineError, UsageError
from flashtune.db.codec import fingerprint
from flashtune.dispatch.platform import table_hash
from flashtune.dispatch.versions import current_versions
from flashtune.templates.registry import families

# The facts on which the selection of a rank depends.
FACTS = ("flashtune", "torch", "Triton", "ptxas", "driver", "templates", "tables or bundles")


def check_ranks(group: Any = None, target_name: str | None = None) -> None:
    """Raises an error if ranks of a distributed job would select different kernels.

    Compares the versions of flashtune, torch, Triton, ptxas and the driver, the templates of kernels, and
    `table_hash`. Every rank of the group must call it. All of them raise the same error, or none does.

    Args:
        group: A process group of torch.distributed, None for the default one.
        target_name: Name of the GPU for `table_hash`. None for each rank's current GPU.

    Raises:
        MachineError: Ranks differ, or one of them cannot read its tables.
        UsageError: torch.distributed has no process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError("there is no process group: call torch.distributed.init_process_group first")
    gathered: list[Any] = [None] * dist.get_world_size(group)
    # A rank that raised its own error now would leave the others waiting.
    dist.all_gather_object(gathered, _facts(target_name), group)
    ranks = dict(zip(dist.get_process_group_ranks(group), gathered, strict=True))
    for rank, facts in ranks.items():
        if isinstance(facts, str):
            raise MachineError(f"rank {rank} cannot select kernels: {facts}")
    usual, _ = Counter(gathered).most_common(1)[0]
    others = [str(rank) for rank, facts in ranks.items() if facts != usual]
    if others:
        first = next(rank for rank, facts in ranks.items() if facts == usual)
        # Another release may compare other facts.
        differing = [name for name, *values in zip(FACTS, *gathered, strict=False) if len({*values}) > 1]
        raise MachineError(
            f"rank {', '.join(others)} would select other kernels than rank {first} (different: "
            f"{', '.join(differing)}): give all ranks the same installation, FLASHTUNE_DB and bundles"
        )


def _facts(target_name: str | None) -> tuple[str, ...] | str:
    """Returns the values of `FACTS`, or the reason why there are none."""
    try:
        versions = [current_versions(family.name) for family in families()]
        own, templates = versions[0], " ".join(version.template for version in versions)
        return (
            own.flashtune, own.torch, own.triton, own.ptxas, own.driver_branch,
            fingerprint(templates.encode()), table_hash(target_name),
        )  # fmt: skip
    except FlashtuneError as error:
        return str(error)
