"""The errors that flashtune raises. Each is one sentence with the cause and the next step."""


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
