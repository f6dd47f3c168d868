"""Tests of servers that accept connections and do not answer. They need psycopg, and no server."""

import socket
import threading
import time
from collections.abc import Iterator
from unittest import mock

import pytest

from flashtune.core.errors import StoreError
from flashtune.db.light import remote
from flashtune.db.light.reader import Reader, open_reader
from flashtune.db.server import Watch, _on_error
from flashtune.db.store import open_store

pytest.importorskip("psycopg", reason="psycopg, the driver of PostgreSQL, is not installed")


@pytest.fixture
def silent() -> Iterator[str]:
    """The URL of a server that accepts connections and stays silent."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"postgresql://me:secret@127.0.0.1:{server.getsockname()[1]}/name"


def seconds_until_given_up(reader: Reader) -> float:
    start = time.monotonic()
    with pytest.raises(StoreError, match="does not answer") as caught:
        reader.selections("nvidia-h200")
    assert "secret" not in str(caught.value)
    return time.monotonic() - start


def test_reader_gives_up_after_a_second_and_does_not_try_again(silent: str) -> None:
    reader, another = open_reader(silent), open_reader(silent)
    assert reader is not None
    assert another is not None
    assert 0.9 < seconds_until_given_up(reader) < 4
    assert seconds_until_given_up(another) < 0.5
    assert [error.__traceback__ for error in remote._failed.values()] == [None]


@pytest.mark.slow
def test_store_gives_up(silent: str) -> None:
    start = time.monotonic()
    with pytest.raises(StoreError, match="does not answer"):
        open_store(silent)
    assert time.monotonic() - start < 8


def test_watch_ends_a_read_from_a_silent_server() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        watch = Watch(ours)
        watch.seconds = 0
        answers: list[bytes] = []
        reading = threading.Thread(target=lambda: answers.append(ours.recv(1)))
        reading.start()
        watch.start()
        reading.join(timeout=10)
        assert (answers, watch.is_over) == ([b""], True)


def test_interrupt_of_a_statement_that_cannot_be_cancelled_is_kept() -> None:
    try:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise OSError  # noqa: B904 - as psycopg does
    except OSError as error:
        context = mock.Mock(original_exception=error)
    with pytest.raises(KeyboardInterrupt):
        _on_error(context, "")
