"""What the runtime tells its user: once per process and matter, as a warning."""

from __future__ import annotations

import threading
import warnings

from flashtune.problem import Causal, Problem

_told: set[str] = set()
_telling = threading.Lock()


class FlashtuneWarning(UserWarning):
    """flashtune serves a call otherwise than one would expect."""


def tell_once(matter: str, message: str) -> None:
    """Warns, unless this process was already told of the matter."""
    with _telling:
        if matter in _told:
            return
        _told.add(matter)
    warnings.warn(message, FlashtuneWarning, stacklevel=3)


def forget_told() -> None:
    """Every matter is news again."""
    with _telling:
        _told.clear()


def search_command(problem: Problem) -> str:
    """The command that tunes a problem."""
    lengths = (
        f"seqlen={problem.seqlen_q}"
        if problem.seqlen_q == problem.seqlen_kv
        else f"seqlen_q={problem.seqlen_q},seqlen_kv={problem.seqlen_kv}"
    )
    widths = f"head_dim={problem.head_dim}"
    if problem.value_head_dim != problem.head_dim:
        widths += f",value_head_dim={problem.value_head_dim}"
    mask = {Causal.NONE: "", Causal.BOTTOM_RIGHT: ",causal", Causal.TOP_LEFT: ",causal=top_left"}[
        problem.causal
    ]
    return (
        f'flashtune search --shape "heads={problem.heads},kv_heads={problem.kv_heads},{lengths},{widths}'
        f',dtype={problem.dtype}{mask},batch={problem.batch}"'
    )
