"""The errors that flashtune raises. Each is one sentence with the cause and the next step."""

import difflib
from collections.abc import Iterable

# Maximum number of names in one sentence.
MAX_NAMED = 6
# Shorter parts occur in unrelated names.
MIN_PART = 4


def printable(text: str) -> str:
    """Returns a text of any origin on one line, with `?` for control codes of terminals."""
    return "".join(sign if sign.isprintable() else "?" for sign in " ".join(text.split()))


class Printable(Exception):  # noqa: N818 - the base of errors and of warnings
    """An error or warning whose text may quote names of any origin."""

    def __str__(self) -> str:
        """Returns the text on one line, without control codes."""
        return printable(super().__str__())


class FlashtuneError(Printable):
    """The base of all errors. The CLI exits with `exit_code`."""

    exit_code = 1


class UsageError(FlashtuneError, ValueError):
    """An argument is invalid or names something that does not exist. The CLI exits with 2."""

    exit_code = 2


class TargetError(UsageError):
    """A GPU is missing, or flashtune does not know its properties."""


class ProblemError(UsageError):
    """A combination of shape, dtype and features is invalid, or no family supports it."""


class TableError(UsageError):
    """A tuned table is damaged, has another schema, or has values out of bounds."""


class BundleError(UsageError):
    """A bundle is damaged, has another format, or cannot hold or serve a kernel."""


class StoreError(FlashtuneError):
    """A database cannot be opened, read or written."""


class KernelError(FlashtuneError):
    """A kernel could not be rendered, compiled, loaded or launched."""


class MachineError(KernelError):
    """The machine prevented a compilation or launch, for example by a full disk or a missing tool."""


class VerificationError(FlashtuneError):
    """A kernel's results differ from the reference, or its receipt is missing or stale."""


class CacheFullError(FlashtuneError):
    """A cache has too few free pages for a request. The cache is unchanged."""


def quoted(text: str) -> str:
    """Returns a user's words for a sentence: one line, escaped, shortened."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.5, others: str = "") -> str:
    """Returns names similar to a word, as the end of a sentence.

    These are the names that begin with the word, else those that contain it, else the most similar one, else
    all or the text `others`. `cutoff` is the least similarity, from 0 to 1.
    """
    names = tuple(known)
    matches = [name for name in names if word and name.startswith(word)]
    matches = matches or [name for name in names if len(word) >= MIN_PART and word in name]
    matches = matches or difflib.get_close_matches(word[:100], names, n=1, cutoff=cutoff)
    if not matches:
        return others or f"choose one of {', '.join(names)}"
    *first, last = map(repr, matches[:MAX_NAMED])
    return f"did you mean {', '.join(first)}{' or ' if first else ''}{last}?"
