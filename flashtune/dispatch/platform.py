"""The facts about this machine on which the choice of kernels depends."""

from collections.abc import Callable

import torch

from flashtune.core.target import TARGETS, Target, device_target
from flashtune.db.location import database_bundle
from flashtune.dispatch.masked_sdpa import MaskTrials
from flashtune.dispatch.sdpa import chosen_backend
from flashtune.dispatch.tables import Tables, tuned_records
from flashtune.launch.bundles import Bundles


class Platform:
    """The GPUs, their tuned records and bundles, and the backend that SDPA selects. Tests pass others."""

    records: Callable[[str], Tables] = staticmethod(tuned_records)
    sdpa_backend = staticmethod(chosen_backend)

    def __init__(self) -> None:
        self.mask_trials = MaskTrials(self.sdpa_backend)
        self.bundles = Bundles(of_database=database_bundle)

    def target(self, device: torch.device) -> Target:
        """Returns the GPU of a device, which is the current one without an index."""
        return device_target(torch.cuda.current_device() if device.index is None else device.index)

    def has_kernels(self, device: torch.device) -> bool:
        """Whether kernels run on a device. Meta tensors have no values, so that nothing runs."""
        return device.type in ("cuda", "meta")

    def is_capturing(self, device: torch.device) -> bool:
        """Whether a CUDA graph is being captured on a device."""
        if device.type != "cuda":
            return False
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()


PLATFORM = Platform()


def table_hash(target_name: str | None = None) -> str:
    """Returns a hash of all records and bundles that dispatch would use on a GPU, as 32 hex digits.

    Ranks can compare it: equal hashes mean equal selections.

    Args:
        target_name: Name of a target, such as `nvidia-h200`. None for the current GPU.
    """
    from flashtune.db import table
    from flashtune.db.codec import fingerprint

    target: Target | None
    if target_name is None:
        target = device_target(torch.cuda.current_device() if torch.cuda.is_available() else 0)
        target_name = target.name
    else:
        target = next((target for target in TARGETS if target.name == target_name), None)
    records = tuned_records(target_name).effective()
    digest = table.table_hash(table.TunedTable(target=target_name, records=records))
    bundles = PLATFORM.bundles.of(target) if target else []
    if not bundles:
        return digest
    return fingerprint(" ".join((digest, *(bundle.digest for bundle in bundles))).encode())
