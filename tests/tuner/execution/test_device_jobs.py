"""Tests of jobs in a process for each GPU."""

import pytest

from flashtune.core.errors import KernelError
from flashtune.tuner.execution.device_jobs import run_on_devices
from tests.tuner.search.fakes import kill_itself, with_process_id


@pytest.mark.slow
def test_each_gpu_has_a_process_and_results_are_in_order() -> None:
    results = list(run_on_devices(with_process_id, [(number,) for number in range(6)], (0, 3), 60.0))
    assert [number for number, _, _ in results] == list(range(6))
    assert {device for _, device, _ in results} == {0, 3}
    assert len({process for _, _, process in results}) == 2
    with pytest.raises(KernelError, match=r"GPU 3: .* \(its process died \(killed by signal 9\)\)"):
        list(run_on_devices(kill_itself, [()], (3,), 60.0))
