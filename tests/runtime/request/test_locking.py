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
from flashtune.core.locks import ModuleLock

HOLD = """
import sys, time
from pathlib import Path
from flashtune.core.files import alone_with
with alone_with(Path(sys.argv[1]), 5.0):
    print("held", flush=True)
    time.sleep(60.0)
"""
FORK = r"""
import os, sys, time
from pathlib import Path
from flashtune.core.files import alone_with
def wait():
    os.write(1, b"child\n")
    time.sleep(60.0)
with alone_with(Path(sys.argv[1]), 5.0):
    child = os.fork()
    if child:
        os.write(1, b"%d\n" % child)
        time.sleep(float(sys.argv[2]))
    elif sys.argv[3] == "inside":
        wait()
if not child:
    wait()
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


@pytest.mark.parametrize(
    ("seconds", "place"),
    [(0.0, "outside"), (60.0, "outside"), (0.0, "inside")],
    ids=["released", "killed", "released with a child inside"],
)
def test_forked_child_does_not_hold_the_lock(tmp_path: Path, seconds: float, place: str) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", FORK, str(path), str(seconds), place]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        lines = [parent.stdout.readline(), parent.stdout.readline()]
        child = int(next(line for line in lines if line != b"child\n"))
        try:
            if seconds:
                with pytest.raises(TimeoutError), alone_with(path, 0.1):
                    pass  # the child left the block, and the parent did not
                parent.kill()
            with alone_with(path, 1.0):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_lock_of_a_module_is_free_in_a_forked_child() -> None:
    lock, held, ends = ModuleLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            ends.wait(60.0)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60.0)
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(10)
            with lock, lock:
                code = 0
        finally:
            os._exit(code)
    ends.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_lock_of_a_module_is_left_in_both_processes_after_a_fork_in_its_block() -> None:
    lock = ModuleLock()
    with lock, lock:
        child = os.fork()
        if not child:
            signal.alarm(10)
    if not child:
        with lock:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert lock._acquired == []


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
