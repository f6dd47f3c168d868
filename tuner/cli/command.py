"""`flashtune_command`: a click command whose help groups its options and ends with examples."""

from collections.abc import Callable
from typing import Any

import click

from flashtune.core.errors import MachineError
from flashtune.core.machine import address_space_fault

# Sections of a help page, in order, and their parameters.
SECTIONS: dict[str, frozenset[str]] = {
    "Shapes": frozenset(
        {
            "shapes",
            "models",
            "hf_configs",
            "shapes_files",
            "recorded_file",
            "top",
            "phase",
            "model_phase",
            "seqlen",
            "batch",
            "dtype",
            "page_size",
            "packed",
            "grids",
        }
    ),
    "GPU": frozenset({"target_name", "target_names", "device", "devices"}),
    "Options": frozenset(),
    "Output": frozenset(
        {"as_json", "quiet", "verbose", "progress", "out", "markdown", "plot", "save", "study", "report"}
    ),
    "General": frozenset({"db", "_click_default_help"}),
}
OTHERS = "Options"
# Commands that load torch and Triton.
HEAVY = frozenset(
    {"search", "warm", "explain", "bench", "render", "doctor", "verify", "sram-audit", "build", "report"}
    | {"intensity", "sram", "memory", "crossover"}
)


class Command(click.Command):
    """A command with grouped options and examples.

    Attributes:
        examples: Command lines, as a user types them.
    """

    def __init__(self, *args: Any, examples: tuple[str, ...] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command, unless a memory limit prevents loading torch and Triton."""
        fault = address_space_fault() if self.name in HEAVY else None
        if fault:
            raise MachineError(fault)
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options, section by section."""
        rows: dict[str, list[tuple[str, str]]] = {name: [] for name in SECTIONS}
        for param in self.get_params(ctx):
            # Arguments are in the usage line.
            row = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if row is not None:
                rows[section_of(param)].append(row)
        for name, listed in rows.items():
            if listed:
                with formatter.section(name):
                    formatter.write_dl(listed)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the examples as commands that can be copied."""
        super().format_epilog(ctx, formatter)
        if self.examples:
            from flashtune.core.notices import folded_command

            with formatter.section("Examples"):
                room = formatter.width - formatter.current_indent
                for example in self.examples:
                    for line in folded_command(example, room).splitlines():
                        formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


class Group(click.Group):
    """A group whose commands also group their options."""

    command_class = Command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the first sentence of each command's help, without a cut."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, (command.help or "").partition("\n\n")[0]) for name, command in commands if command]
            )


def section_of(param: click.Parameter) -> str:
    """Returns the section of a help page that lists a parameter."""
    return next((name for name, params in SECTIONS.items() if param.name in params), OTHERS)


def flashtune_command(name: str, *examples: str) -> Callable[[Callable[..., Any]], Command]:
    """Makes a function a command. `examples` are command lines for the end of its help."""
    return click.command(name, cls=Command, examples=examples)
