"""Registers flashtune as an attention backend of SGLang.

SGLang calls `register` in each of its processes, by an entry point of the group `sglang.srt.plugins`. The
backend is then selected by name:

    python -m sglang.launch_server --model-path MODEL --attention-backend flashtune --page-size 64

It is not in SGLang's list of deterministic backends: other requests of a batch can change the bits of a
result. The number of splits of the keys depends on the batch and its longest sequence.
"""

from __future__ import annotations

from flashtune.integrations.host_library import host_library
from flashtune.integrations.sglang_backend import LEAST, make_backend

NAME = "flashtune"


def register() -> None:
    """Registers the backend and its name for `--attention-backend`. A repeated call changes nothing.

    Raises:
        UsageError: SGLang is missing or too old.
    """
    choices = host_library("sglang.srt.arg_groups.choices", LEAST)
    registry = host_library("sglang.srt.layers.attention.attention_registry", LEAST)
    if NAME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([NAME])
    registry.register_attention_backend(NAME)(make_backend)
