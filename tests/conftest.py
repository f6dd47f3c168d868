"""Fixtures of all tests: they isolate the user's files, and skip GPU tests without a GPU."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

# Tests run in several processes at once. Threads of torch's would wait for each other for most of the time.
# Set before torch is imported, for this process and those that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Messages are folded at this width, also in log files. Tests that fold set their own.
os.environ.pop("COLUMNS", None)

import torch

from tests.db import postgres
from tests.support import families, fuzzing, sampling, times

# Imports and collected tests are not garbage, and searching them takes half of the time of parsing a kernel.
gc.disable()

# A command in the background ignores these signals, and so do the processes that it starts. Python's handlers
# are not inherited.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# benchmarks and scripts are not installed. The root comes last, so that an installed package is found first.
sys.path.append(str(Path(__file__).parents[1]))

# Timings differ widely between machines, and a failure must come back on the next run.
hypothesis.settings.register_profile(
    "flashtune", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("flashtune")

native = families.native
ship = families.ship
postgres_database = postgres.postgres_database
postgres_server = postgres.postgres_server
own_postgres = postgres.own_postgres

# Triton reads the variable when it is imported, so these tests have a process of their own.
if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore = ["interpreter"]


@pytest.fixture
def interpret(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Selects Triton's interpreter from a call on."""
    from flashtune.launch.compilation import interpreting

    def select() -> None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        interpreting.cache_clear()

    yield select
    interpreting.cache_clear()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of this test suite."""
    parser.addoption("--times", type=Path, metavar="FILE", help="write the CPU seconds of each test to FILE")
    parser.addoption(
        "--sample", action="store_true", help="run a sample of the cases of tests marked sampled"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Records times on request: processes of pytest-xdist measure, and the first one writes."""
    path = config.getoption("--times")
    if path is not None:
        # Not by the environment, which a run that a test starts inherits.
        worker = hasattr(config, "workerinput")
        config.pluginmanager.register(times.Recorder(None if worker else path.absolute()), "times")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests that need a GPU where there is none, or the machine to themselves; takes the sample."""
    if config.getoption("--sample"):
        others = sampling.left_out(items)
        config.hook.pytest_deselected(items=[*others])
        items[:] = [item for item in items if item not in others]
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = pytest.mark.skip(reason="needs a CUDA GPU")
    if "PYTEST_XDIST_WORKER" in os.environ:
        missing["alone"] = pytest.mark.skip(reason="needs the machine to itself")
    for item in items:
        for name, skip in missing.items():
            if item.get_closest_marker(name):
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Collects garbage of tests only."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for rendered kernels, shared by the tests of one process and by those that they start."""
    # Hypothesis searches modules for constants, except in folders of this name. Kernels are many and long.
    folder = tmp_path_factory.mktemp("kernels") / "tests"
    folder.mkdir()
    os.environ["FLASHTUNE_CACHE_DIR"] = str(folder)
    return folder


@pytest.fixture(autouse=True)
def own_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database that does not exist yet, in place of the user's."""
    path = tmp_path / "flashtune.sqlite"
    monkeypatch.setenv("FLASHTUNE_DB", str(path))
    return path


@pytest.fixture(name="fuzz_count", scope="session")
def fuzz_count_of_a_run() -> Callable[[int, int], int]:
    """`fuzz_count(small, large)` of `tests.support.fuzzing`: the number of cases that a fuzzer tries."""
    return fuzzing.fuzz_count
