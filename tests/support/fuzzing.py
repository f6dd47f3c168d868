"""The number of fuzzed cases: few by default, many with `FLASHTUNE_FUZZ=large`."""

import os

VARIABLE = "FLASHTUNE_FUZZ"
SIZES = ("small", "large")


def fuzz_count(small: int, large: int) -> int:
    """Returns the number of cases to try.

    It can be called where a module is imported, for `hypothesis.settings(max_examples=...)`. Tests may take
    the fixture of the same name instead.

    Args:
        small: The number for `make test`; a second or two of CPU time.
        large: The number for `make test-all`, which sets the variable to `large`.

    Raises:
        ValueError: The variable is set to neither `small` nor `large`.
    """
    size = os.environ.get(VARIABLE, "small")
    if size not in SIZES:
        message = f"{VARIABLE} is {size!r}: set it to small or large, or unset it"
        raise ValueError(message)
    return large if size == "large" else small
