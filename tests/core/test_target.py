import pytest

from flashtune.core.errors import TargetError
from flashtune.core.target import TARGETS, find_target


@pytest.mark.parametrize("name", ["h200", "nvidia-h200", "NVIDIA H200", " H200 "])
def test_find_target_accepts_common_names(name: str) -> None:
    assert find_target(name).name == "nvidia-h200"


def test_unknown_target_error_lists_known_targets() -> None:
    with pytest.raises(TargetError, match=r"there is no target 'h900': choose one of a100, .*mi300x"):
        find_target("h900")


def test_sram_capacities_match_vendor_guides() -> None:
    capacities = {target.arch: target.sram_per_block for target in TARGETS}
    assert capacities == {
        "sm_80": 166912,
        "sm_89": 101376,
        "sm_90": 232448,
        "sm_100": 232448,
        "sm_120": 101376,
        "gfx942": 65536,
    }
