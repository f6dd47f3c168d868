"""Clears the state that calls leave in a process."""

from __future__ import annotations

from flashtune.core import notices
from flashtune.dispatch import masked_sdpa
from flashtune.runtime import self_check


def forget_warnings() -> None:
    """Clears the record of emitted warnings."""
    notices._seen_messages.clear()


def forget_refusals() -> None:
    """Clears the results of all trials of SDPA."""
    masked_sdpa._refusals.clear()
    masked_sdpa._meanings.clear()


def forget_verdicts() -> None:
    """Clears the verdicts of this process, so that the database is read again."""
    self_check._known.clear()
