"""The command line: `flashtune COMMAND`. Each command has a module in `commands`.

A command's module is imported at its call, so `flashtune --help` imports little more than click.
"""

import atexit
import contextlib
import errno
import importlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from flashtune.core import VERSION
from flashtune.core.errors import FlashtuneError, MachineError, nearest, quoted

# Plus the number of the signal.
INTERRUPTED = 128
# Errors of an open file that cannot be written: a full disk or quota, a file over its limit, a broken device.
UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
# A limit of the machine is met, whichever file is opened.
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})

# Sections of the list of commands, with names and one line of help each. Command NAME is the attribute
# `command` of the module that `module_name` returns.
SECTIONS: dict[str, dict[str, str]] = {
    "Tune": {
        "search": "Find the fastest correct kernel for a shape; without a GPU, rank candidates.",
        "worker": "Search the shapes of a queue on this machine's GPUs.",
        "queue": "Shapes that wait for workers: status, list, retry, cancel.",
        "warm": "Compile and load the kernels of a program before it starts.",
    },
    "Inspect": {
        "show": "List stored kernels: the selected ones, or every record of a shape.",
        "report": "Write stored kernels and searches as pages for a browser, or as Optuna studies.",
        "explain": "Explain a kernel's speed: SRAM, roofline, traffic, occupancy, other candidates.",
        "analyze": "Intensity, SRAM, training memory, crossover length and cache use, over one axis.",
        "bench": "Time selected kernels and other implementations, interleaved.",
        "render": "Write the kernel of a shape as a readable Python file.",
    },
    "Check": {
        "doctor": "Check this machine's installation, and print a remedy for each problem.",
        "verify": "Check that selected kernels compile, fit the GPU and match the reference.",
        "sram-audit": "Compare the SRAM models with the compiler's figures.",
    },
    "Share": {
        "export": "Write selected kernels: json (a table), python (files), triton-config (lists), "
        "hf-kernel (a package for Hugging Face's kernels library).",
        "import": "Read a JSON table into the database.",
        "bundle": "Files of compiled kernels: build, list, merge.",
        "db": "Databases: path, upgrade, merge, pull, forget (delete records), compare (two tables).",
    },
    "List names": {
        "shapes": "Explain the keys of --shape.",
        "models": "List the models that --model knows.",
        "targets": "List the GPUs that --target knows.",
        "families": "List the kernel families and their features.",
    },
}
COMMANDS: dict[str, str] = {name: text for section in SECTIONS.values() for name, text in section.items()}

EPILOG = """\b
Exit codes:
  0    success
  1    failure: a wrong kernel, an unreadable database, a failed check
  2    invalid command line, file or shape
  130  interrupted; finished results are stored (SIGHUP 129, SIGTERM 143)
"""


class Failure(click.ClickException):
    """A `FlashtuneError` as the command line reports it: its sentence, and its exit code."""

    def __init__(self, error: FlashtuneError) -> None:
        super().__init__(str(error))
        self.exit_code = error.exit_code  # type: ignore[misc] # click's own subclasses set it too

    def show(self, file: Any = None) -> None:
        """Writes the sentence to stderr."""
        from flashtune.tuner.cli.output import folded

        click.echo(folded(f"flashtune: {self.message}", err=True), file=file, err=True)


class CommandGroup(click.Group):
    """The commands by name, each imported at its call."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Returns all names, in the order of the sections."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Returns the command of a name, or None."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"{__name__}.commands.{module_name(cmd_name)}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolves a command as click does, and suggests the nearest name if there is none."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            ctx.fail(f"there is no command {quoted(args[0])}: {nearest(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Writes the list of commands without importing any."""
        width = max(map(len, COMMANDS))
        for title, section in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{width}}", text) for name, text in section.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Stores the command line, so that a command can print it."""
        ctx.meta["flashtune.core.arguments"] = tuple(args)
        return super().parse_args(ctx, args)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Runs as click does, with one sentence for output that cannot be written."""
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            # Errors of standard output name no file. Named files have errors of their own.
            if error.errno not in UNWRITABLE or error.filename is not None:
                raise
            from flashtune.tuner.cli.output import warn

            _give_up_output()
            warn(f"cannot write the output: {error.strerror}; write it elsewhere")
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command. flashtune's errors become one sentence and an exit code."""
        try:
            with plain_warnings(), ended_by_signals():
                return super().invoke(ctx)
        except FlashtuneError as error:
            raise Failure(error) from error
        except (MemoryError, ImportError, RuntimeError, OSError) as error:
            from flashtune.core.machine import machine_fault

            is_of_a_file = isinstance(error, OSError) and error.errno not in EXHAUSTED
            fault = None if is_of_a_file else machine_fault(error)
            if fault is None:
                raise
            raise Failure(MachineError(fault)) from error
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            from flashtune.tuner.cli.output import folded

            # click writes its own errors after this word.
            sentence = folded(f"Error: {error.format_message()}", err=True).removeprefix("Error: ")
            raise click.UsageError(sentence, error.ctx) from error
        except KeyboardInterrupt as interrupt:
            from flashtune.tuner.cli.output import warn

            warn("interrupted; finished results are stored")
            ctx.exit(INTERRUPTED + next(iter(interrupt.args), signal.SIGINT))


def _give_up_output() -> None:
    """Drops the buffer of standard output: Python would try to write it again at exit."""
    with contextlib.suppress(OSError, ValueError), Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Shows flashtune's own warnings as sentences on stderr, and leaves those of other libraries."""
    before = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *location: Any, **rest: Any) -> None:
        if category.__module__.startswith("flashtune."):
            from flashtune.tuner.cli.output import warn

            warn(str(message))
        else:
            before(message, category, *location, **rest)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP interrupt a command as Ctrl-C does, so that no process or folder is left.

    A second signal ends the program. A signal that is ignored, as with nohup, stays ignored.
    """
    default = signal.SIG_DFL
    handled = [
        signal_number
        for signal_number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(signal_number) is default
    ]
    if threading.current_thread() is not threading.main_thread():
        handled = []

    def restore() -> None:
        for signal_number in handled:
            signal.signal(signal_number, default)

    def interrupt(number: int, _: object) -> None:
        restore()
        raise KeyboardInterrupt(number)

    for signal_number in handled:
        signal.signal(signal_number, interrupt)
    try:
        yield
    finally:
        restore()


def module_name(command: str) -> str:
    """Returns the module of a command: `sram-audit` is in `sram_audit`, `import` in `import_`.

    Commands that list names are in `listing`.
    """
    name = "import_" if command == "import" else command.replace("-", "_")
    return f"listing.{name}" if command in SECTIONS["List names"] else name


@click.group(
    cls=CommandGroup,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(VERSION, message="%(prog)s %(version)s")
def main() -> None:
    """Generate, search, verify and dispatch flash-attention kernels."""
    atexit.register(_release_bindings)


def _release_bindings() -> None:
    """Clears the module through which Triton's bindings outlive the interpreter.

    After a compilation of Gluon, the library of Triton 3.9 keeps this module until the process ends. nanobind
    would then report the bindings to which the module refers as leaks.
    """
    module = sys.modules.get("triton.experimental.gluon.language._semantic")
    if module is not None:
        vars(module).clear()
