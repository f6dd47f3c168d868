"""Registers flashtune as an attention backend of SGLang.

SGLang calls `plugin` in each of its processes, by an entry point of the group `sglang.srt.plugins`. The
backend is then selected by name:

    python -m sglang.launch_server --model-path MODEL --attention-backend flashtune --page-size 64

It is in SGLang's lists of deterministic backends: with --enable-deterministic-inference, other requests of a
batch and cached prefixes do not change the bits of a result. This needs an sm_90 GPU.
"""

from flashtune.core.errors import UsageError
from flashtune.core.notices import warn_once
from flashtune.integrations.host_library import host_attribute
from flashtune.integrations.sglang_backend import LEAST, make_backend

NAME = "flashtune"
CHOICES = "sglang.srt.arg_groups.choices"
# All backends, and those for deterministic inference, without and with cached prefixes.
ADDERS = (
    "add_attention_backend_choices",
    "add_deterministic_attention_backend_choices",
    "add_radix_supported_deterministic_attention_backend_choices",
)
REGISTRY = "sglang.srt.layers.attention.attention_registry"


def register() -> None:
    """Registers the backend and its name for `--attention-backend`. A repeated call changes nothing.

    Raises:
        UsageError: SGLang is missing, too old or too new.
    """
    names = host_attribute(CHOICES, "ATTENTION_BACKEND_CHOICES", LEAST)
    adders = [host_attribute(CHOICES, name, LEAST) for name in ADDERS]
    register_backend = host_attribute(REGISTRY, "register_attention_backend", LEAST)
    if NAME not in names:
        for add_names in adders:
            add_names([NAME])
    register_backend(NAME)(make_backend)


def plugin() -> None:
    """Registers the backend, or warns: an error here would stop all servers of an unsupported SGLang."""
    try:
        register()
    except UsageError as error:
        warn_once("sglang", f"sglang has no attention backend {NAME}: {error}")
