"""The errors that flashtune raises: one sentence each, saying what, where and what to do next."""


class FlashtuneError(Exception):
    """Anything that flashtune refuses or cannot do. The CLI exits with `exit_code`."""

    exit_code = 1


class UsageError(FlashtuneError, ValueError):
    """The caller asked for something that does not exist or cannot be: the CLI exits with 2."""

    exit_code = 2


class TargetError(UsageError):
    """A GPU that flashtune has no facts about, or that is not there."""


class ProblemError(UsageError):
    """A shape, dtype or feature combination that is impossible or that no family supports."""


class TableError(UsageError):
    """A tuned table that is damaged, of another schema, or holds values outside their bounds."""


class StoreError(FlashtuneError):
    """A database that cannot be opened, read or written."""


class KernelError(FlashtuneError):
    """A kernel that could not be rendered, compiled, loaded or launched."""


class MachineError(KernelError):
    """A kernel could not be compiled or launched because of the machine: a full disk, a missing tool."""


class VerificationError(FlashtuneError):
    """A kernel whose results differ from the reference, or whose receipt is missing or stale."""


class CacheFullError(FlashtuneError):
    """A cache that has too few free pages for what was asked; nothing of it was changed."""
