"""Decoders of JSON for threads."""

import threading
from typing import TypeVar

import msgspec

Kind = TypeVar("Kind")

_building = threading.Lock()


def json_decoder(kind: type[Kind]) -> msgspec.json.Decoder[Kind]:
    """Returns a decoder of a type.

    msgspec 0.22 crashes if two threads use a type for the first time, so one thread at a time makes decoders.
    """
    with _building:
        return msgspec.json.Decoder(kind)
