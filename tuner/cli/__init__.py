"""The command line: `flashtune COMMAND`. Each command lives in a module of its own beside this one.

A command's module is imported when the command is called, so that `flashtune --help` costs no more
than click.
"""

from __future__ import annotations

import difflib
import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from flashtune.errors import FlashtuneError

INTERRUPTED = 130

# Name and one line of help; command NAME is the attribute `command` of the module of that name,
# with `_` for `-`, and with a trailing `_` where the name is a Python keyword.
COMMANDS: dict[str, str] = {
    "doctor": "Check what this machine has, and say what to do about what it lacks.",
    "search": "Find the fastest right kernel for shapes on a GPU, or rank candidates without one.",
    "show": "List what is stored: selected kernels, or every record of a problem.",
    "explain": "Say why a kernel is as fast as it is: SRAM, roofline, traffic, occupancy, rivals.",
    "render": "Write the kernel of a shape as a Python file that a person can read.",
    "verify": "Check that every selected kernel compiles, fits and computes what it should.",
    "bench": "Time selected kernels side by side with other implementations.",
    "export": "Write selected kernels as a JSON table, as Python files or as triton.Config lists.",
    "import": "Read a JSON table into the database.",
    "sram-audit": "Compare the SRAM models with what the compiler asks for.",
    "db": "Locate, upgrade and merge databases.",
}

EPILOG = """\b
Exit codes:
  0    done
  1    the work failed: a kernel is wrong, a database cannot be read, a check did not pass
  2    the command line, a file or a shape cannot be used as given
  130  interrupted; what was finished is stored
"""


class Failure(click.ClickException):
    """A `FlashtuneError` as the command line reports it: its sentence, and its exit code."""

    def __init__(self, error: FlashtuneError) -> None:
        # A sentence may quote a file's or a database's own words: they must not steer a terminal.
        sentence = " ".join(str(error).split())
        super().__init__("".join(sign if sign.isprintable() else "?" for sign in sentence))
        self.exit_code = error.exit_code  # type: ignore[misc] # click's own subclasses set it too

    def show(self, file: Any = None) -> None:
        """Writes the sentence to stderr."""
        click.echo(f"flashtune: {self.message}", file=file, err=True)


class CommandGroup(click.Group):
    """The commands by name, each imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """All names, in the order in which a user meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command of a name, or None."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"{__name__}.{module_name(cmd_name)}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, naming the nearest command when there is none of that name."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(COMMANDS)}"
            ctx.fail(f"there is no command {args[0]!r}: {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """The list of commands, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command; errors of flashtune's become one sentence and an exit code."""
        try:
            with plain_warnings():
                return super().invoke(ctx)
        except FlashtuneError as error:
            raise Failure(error) from error
        except KeyboardInterrupt:
            click.echo("flashtune: interrupted; what was finished is stored", err=True)
            ctx.exit(INTERRUPTED)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Shows flashtune's own warnings as sentences on stderr, and other libraries' as ever."""
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **rest: Any) -> None:
        if category.__module__.startswith("flashtune."):
            click.echo(f"flashtune: {message}", err=True)
        else:
            usual(message, category, *place, **rest)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def module_name(command: str) -> str:
    """The module of a command: `sram-audit` lives in `sram_audit`, `import` in `import_`."""
    return "import_" if command == "import" else command.replace("-", "_")


@click.group(
    cls=CommandGroup,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="flashtune", message="%(prog)s %(version)s")
def main() -> None:
    """Generate, search, prove and dispatch flash-attention kernels for the GPU at hand."""
