"""Registers flashtune as an attention backend of vLLM.

vLLM calls `plugin` in each of its processes, by an entry point of the group `vllm.general_plugins`. The
backend is then selected by name:

    vllm serve MODEL --attention-backend FLASHTUNE
"""

from flashtune.core.errors import UsageError
from flashtune.core.notices import warn_once
from flashtune.integrations.host_library import host_attribute

NAME = "FLASHTUNE"
BACKEND = "flashtune.integrations.vllm_backend.Backend"
# Before this version, a cache has keys and values in separate pages, and backends have no names of their own.
LEAST = "0.33"
REGISTRY = "vllm.v1.attention.backends.registry"


def register() -> None:
    """Registers the backend, unless this process has registered it.

    Raises:
        UsageError: vLLM is missing, too old or too new.
    """
    names = host_attribute(REGISTRY, "AttentionBackendEnum", LEAST).__members__
    register_backend = host_attribute(REGISTRY, "register_backend", LEAST)
    if NAME not in names:
        register_backend(NAME, BACKEND)


def plugin() -> None:
    """Registers the backend, or warns: an error here would stop all servers of an unsupported vLLM."""
    try:
        register()
    except UsageError as error:
        warn_once("vllm", f"vllm has no attention backend {NAME}: {error}")
