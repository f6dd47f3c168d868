"""Tests of faults of the environment: the exit code, the message, and the stored records.

Each fault lies under one folder that a search writes, or takes away something that it needs.
Faults of the environment are stored of no candidate, so the same command ends well once the fault is gone.
"""

import contextlib
import errno
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashtune.core.record import Outcome
from flashtune.db.store import open_store
from flashtune.templates import registry
from flashtune.tuner.cli import main
from tests.support.full_disk import small_disk

SHAPE = "heads=1,seqlen=64,head_dim=16,dtype=fp16"
COMMAND = ("search", "--shape", SHAPE, "--target", "a100", "--trials", "1", "--jobs", "1", "--quiet")
NO_SPACE = r"(No space left on device|File too large)"
GOES_ON = "what was finished is stored, and the same command goes on"

Environment = dict[str, str]


class Place:
    """The folders that a search writes, all below one folder.

    Attributes:
        root: That folder.
        environment: The variables that name the folders.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.database = root / "database" / "flashtune.sqlite"
        (root / "temporary").mkdir()
        self.environment = os.environ | {
            "FLASHTUNE_CACHE_DIR": str(root / "cache"),
            "FLASHTUNE_DB": str(self.database),
            "TRITON_CACHE_DIR": str(root / "triton"),
            "TMPDIR": str(root / "temporary"),
        }

    def search(
        self, changes: Environment, limit: Callable[[], None] | None = None, *command: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs the command line with some variables changed, under a limit of a resource."""
        return subprocess.run(
            [sys.executable, "-m", "flashtune.tuner.cli", *(command or COMMAND)],
            env=self.environment | changes,
            preexec_fn=limit,
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )

    def refused(
        self, words: str, changes: Environment, limit: Callable[[], None] | None = None, *command: str
    ) -> None:
        """A search ends with exit code 1 and one sentence, and stores nothing that a fault caused."""
        done = self.search(changes, limit, *command)
        assert done.returncode == 1, done.stderr
        assert "Traceback" not in done.stderr
        said = [line for line in done.stderr.splitlines() if line.startswith("flashtune: ")]
        assert len(said) == 1, done.stderr
        assert re.search(words, said[0]), said[0]
        if self.database.exists():
            with open_store(str(self.database)) as store:
                assert {entry.record.outcome for entry in store.records()} <= {Outcome.OK}

    def ends_well(self, changes: Environment) -> None:
        """A search in this environment finds a kernel."""
        done = self.search(changes)
        assert done.returncode == 0, done.stderr
        with open_store(str(self.database)) as store:
            assert len(store.selections()) == 1


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder with a short name: paths of the sockets of worker processes have at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="ft", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def setup(root: Path) -> Place:
    return Place(root)


@pytest.fixture
def disk(root: Path) -> Iterator[Callable[[int], tuple[Path, Callable[[], None] | None]]]:
    """Creates a disk with a number of free bytes, and the limit of a process to it."""
    with contextlib.ExitStack() as mounted:
        yield lambda left: mounted.enter_context(small_disk(root / "disk", left))


def below_a_file(setup: Place) -> str:
    """A folder that cannot be created, even by root."""
    (setup.root / "file").write_text("")
    return str(setup.root / "file" / "folder")


@pytest.mark.slow
def test_full_triton_cache_and_limit_of_file_sizes(
    setup: Place, disk: Callable[[int], tuple[Path, Callable[[], None]]]
) -> None:
    folder, limit = disk(0)
    triton = {"TRITON_CACHE_DIR": str(folder / "triton")}
    setup.refused(rf"{NO_SPACE}.*free some space|raise the limit.*; {GOES_ON}", triton, limit)
    # Triton needs a C compiler to launch kernels, and none to compile them; Python replaces TMPDIR by /tmp.
    without_tools = {"PATH": str(setup.root), "CC": "/nonexistent/cc"}
    setup.ends_well(without_tools | {"TMPDIR": below_a_file(setup)})

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, 16 << 10))

    more = ("--trials", "3")
    setup.refused(r"cannot be written \(File too large\): raise the limit", {}, small_files, *COMMAND, *more)


@pytest.mark.slow
def test_full_temporary_folder(setup: Place, disk: Callable[[int], tuple[Path, Callable[[], None]]]) -> None:
    # Triton writes assembly and binaries there, of which the first do not fit.
    folder, limit = disk(24 << 10)
    setup.refused(rf"{NO_SPACE}.*; {GOES_ON}", {"TMPDIR": str(folder)}, limit)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "words"),
    [
        (
            "TRITON_CACHE_DIR",
            f"the Triton cache .*/file/folder cannot be written.*set TRITON_CACHE_DIR; {GOES_ON}",
        ),
        (
            "FLASHTUNE_CACHE_DIR",
            "the kernel cache .*/file/folder/kernels cannot be written.*FLASHTUNE_CACHE_DIR",
        ),
    ],
)
def test_unwritable_folder(setup: Place, variable: str, words: str) -> None:
    setup.refused(words, {variable: below_a_file(setup)})


@pytest.mark.slow
@pytest.mark.parametrize("mebibytes", [400, 600])
def test_memory_limit(setup: Place, mebibytes: int) -> None:
    def limit() -> None:
        # Enough for Python, and too little for Triton and torch.
        resource.setrlimit(resource.RLIMIT_AS, (mebibytes << 20, mebibytes << 20))

    setup.refused(f"the limit of {mebibytes} MiB of memory is too low.*raise the limit", {}, limit)


@pytest.mark.slow
def test_open_files_limit(setup: Place) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))

    setup.refused("too many files are open|Too many open files", {}, limit)


@pytest.mark.slow
def test_killed_and_unrunnable_ptxas(setup: Place) -> None:
    tool = setup.root / "ptxas"
    tool.write_text(
        '#!/bin/sh\ncase "$1" in --version) echo "release 12.8, V12.8.93";; *) kill -9 $$;; esac\n'
    )
    tool.chmod(0o755)
    setup.refused(rf"ptxas was killed \(signal 9\).*; {GOES_ON}", {"TRITON_PTXAS_PATH": str(tool)})


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_exhausted_resource_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number), "templates")

    monkeypatch.setattr(registry, "family_names", fail)
    with pytest.raises(SystemExit, match="1"):
        main(["sram-audit"])
    said = capsys.readouterr().err
    assert re.fullmatch(r"flashtune: (too many files are open|memory ran out).*\n", said, re.DOTALL), said
    assert "Traceback" not in said
