"""Whether calls of this process are batch-invariant unless they say otherwise."""

from flashtune.core.arguments import read_flag

_is_default = False


def set_batch_invariant(flag: bool) -> None:
    """Sets the default of `batch_invariant` for later calls of flashtune in this process, on all threads.

    Plans keep the value with which they were made. Replaced operators of torch and transformers and saved
    graphs do not follow it.

    Raises:
        ProblemError: `flag` is not a bool.
    """
    global _is_default  # noqa: PLW0603 (one setting of the process)
    _is_default = read_flag("flag", flag)


def is_batch_invariant() -> bool:
    """Returns the default of `batch_invariant`, False unless `set_batch_invariant` changed it."""
    return _is_default
