"""Tests of the file lock between processes and threads."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from flashtune.core.files import alone_with

HOLD = """
import sys, time
from pathlib import Path
from flashtune.core.files import alone_with
with alone_with(Path(sys.argv[1]), 5.0):
    print("held", flush=True)
    time.sleep(60.0)
"""
FORK = """
import os, sys, time
from pathlib import Path
from flashtune.core.files import alone_with
with alone_with(Path(sys.argv[1]), 5.0):
    child = os.fork()
    if not child:
        time.sleep(60.0)
        os._exit(0)
print(child, flush=True)
"""


def test_lock_excludes_threads_and_admits_all(tmp_path: Path) -> None:
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        with alone_with(tmp_path / "lock", 30.0):
            inside += 1
            most = max(most, inside)
            time.sleep(0.01)
            inside -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == (0, 1)


def test_lock_waits_for_live_processes_only(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(TimeoutError, match="another process holds"), alone_with(path, 0.1):
            pass
        with pytest.raises(Timeout), FileLock(path, timeout=0.1):
            pass
        holder.kill()
    with alone_with(path, 5.0):
        pass


def test_forked_child_does_not_hold_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", FORK, str(path)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            with alone_with(path, 1.0):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_removed_lock_file_does_not_block(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    entered = threading.Event()

    def work() -> None:
        with alone_with(path, 5.0):
            entered.set()
            assert path.exists()

    with alone_with(path, 5.0):
        thread = threading.Thread(target=work)
        thread.start()
        path.unlink()
        with alone_with(path, 5.0):
            # The file is another one by now, which this thread holds, or the other has held.
            pass
    thread.join()
    assert entered.is_set()


def test_unwritable_folder_raises_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), alone_with(tmp_path / "none" / "lock", 0.1):
        pass
