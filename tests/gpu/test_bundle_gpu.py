"""Launches from bundles on a GPU: their results are those of Triton's launcher, bit for bit."""

import threading
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks.host.bundle_launch import NO_TABLES, SHAPES, make_case
from flashtune.bundle.bundle_file import dump_bundle, open_bundle
from flashtune.bundle.records import Receipt
from flashtune.core.target import device_target
from flashtune.tuner.tables.bundles import build
from flashtune.tuner.tables.warm import calls_of
from flashtune.tuner.verify.bundle_verification import unverified, uses_of, verify
from flashtune.tuner.verify.verify_jobs import Runs
from flashtune.tuner.workloads.shapes import parse_shape
from tests.gpu.marks import ON_HOPPER

pytestmark = [pytest.mark.gpu, ON_HOPPER]
DEVICE = torch.device("cuda", 0)
# Their sums are in another order in each run.
IN_ANY_ORDER = {"backward_fused", "backward_hopper"}


@pytest.mark.parametrize("name", SHAPES)
def test_results_are_those_of_triton(name: str) -> None:
    problem = parse_shape(SHAPES[name])[0]
    case = make_case(problem, DEVICE)
    expected, found = case.results(case.triton), case.results(case.bundle)
    ordered = problem.deterministic or case.kernel.family not in IN_ANY_ORDER
    for one, two in zip(expected, found, strict=True):
        assert torch.equal(one, two) if ordered else torch.allclose(one, two, rtol=2e-2, atol=2e-2)
        assert one.count_nonzero()


def test_launch_in_a_new_thread_and_a_graph() -> None:
    case = make_case(parse_shape(SHAPES["plain"])[0], DEVICE)
    expected = case.results(case.triton)

    def launch_in_thread() -> None:
        # The launch is the thread's first use of the driver.
        thread = threading.Thread(target=case.bundle)
        thread.start()
        thread.join()

    found = [case.results(launch_in_thread)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.bundle()
    found.append(case.results(graph.replay))
    for results in found:
        assert all(torch.equal(one, two) for one, two in zip(expected, results, strict=True))
    assert len(found) == 2


def test_interrupted_verification_continues(tmp_path: Path) -> None:
    path, target = tmp_path / "kernels.bundle", device_target(0)
    calls = calls_of(parse_shape(SHAPES[name])[0] for name in ("plain", "gradients"))
    built = build(calls, target, NO_TABLES)
    # Some kernels have receipts in the repository.
    entries = [msgspec.structs.replace(entry, receipts=()) for entry in built.entries]
    path.write_bytes(dump_bundle(target.arch, "1.0", entries, built.codes))
    for seconds, verified in ((0.0, 0), (None, len(calls))):
        bundle = open_bundle(path)
        kernels = unverified(bundle, target)
        uses = uses_of(bundle, kernels, calls, target, NO_TABLES)
        assert len(calls) == len(kernels) == len(uses) == 3
        results = verify(path, path, uses, (0,), 2, Runs(seconds))
        assert len(results) == verified
        assert all(isinstance(result, Receipt) for result in results.values()), results
    assert not unverified(open_bundle(path), target)
