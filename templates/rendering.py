"""Renders a family, a problem's static features, a config and a specialisation to a `Kernel`."""

import enum
import functools
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import jinja2
import msgspec

from flashtune.core.config import Config
from flashtune.core.errors import KernelError
from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.problem import Problem
from flashtune.templates.common.args.function_lines import function_lines
from flashtune.templates.common.args.gluon_functions import gluon_function_lines
from flashtune.templates.common.args.gluon_table_gradients import gluon_gradient_lines
from flashtune.templates.common.args.side import side_names
from flashtune.templates.common.args.table_gradients import table_lines, table_numbers
from flashtune.templates.common.checks import check_context
from flashtune.templates.dead_branches import remove_dead_branches
from flashtune.templates.docstring_rows import remove_absent_rows
from flashtune.templates.family import Context, Family, kernel_of_source
from flashtune.templates.registry import PACKAGE, TEMPLATE, template_hash

# The checks of wrappers do not affect kernels, so template versions exclude them.
CHECKS = "common/checks.jinja"


def render(family: Family, problem: Problem, config: Config, specialization: Specialization) -> Kernel:
    """Returns the kernel of a config for a problem. It does not depend on lengths, heads and batch.

    Jinja repeats and names parts. Conditions on flags, the booleans of the config and the context in capital
    letters, are Python: `remove_dead_branches` replaces them. `remove_absent_rows` keeps the rows of
    docstrings that explain the result. `parameters` has the parameters of each launched function, by its
    name; `side_names` and others have the names of extra inputs.
    """
    environment = _environment()
    context = family.context(problem, config, specialization)
    values = _checked_values({**msgspec.structs.asdict(config), **context})
    kernel = kernel_of_source(family, problem, config, specialization, "")
    check_values = _checked_values(check_context(family, problem, specialization))
    checks = remove_dead_branches(environment.get_template(CHECKS).render(check_values), _flags(check_values))
    parameters = _parameters(kernel)
    source = environment.get_template(f"{family.name}/{TEMPLATE}").render(
        values,
        template_hash=template_hash(family.name)[:12],
        kernel_name=family.name,
        parameters={name: ",\n    ".join(names) for name, names in parameters.items()},
        **side_names({name for names in parameters.values() for name in names}),
        checks=checks.strip(),
    )
    flags = _flags(values)
    return msgspec.structs.replace(
        kernel, source=remove_absent_rows(remove_dead_branches(source, flags), flags)
    )


def _parameters(kernel: Kernel) -> dict[str, list[str]]:
    """Returns the parameters of the kernel and its steps, by the names of their functions."""
    arguments = {kernel.entry: kernel.arguments} | {step.entry: step.arguments for step in kernel.steps}
    return {entry: [argument.name for argument in items] for entry, items in arguments.items()}


def _flags(values: Context) -> dict[str, bool]:
    """Returns the flags of a template: all booleans, with names in capital letters."""
    flags = {name.upper(): value for name, value in values.items() if isinstance(value, bool)}
    for value in values.values():
        if isinstance(value, Mapping):
            flags |= _flags(value)
    return flags


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read_template),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 - Python source, from ints, bools and enums alone
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["function_lines"] = function_lines
    environment.globals["gluon_function_lines"] = gluon_function_lines
    environment.globals["gluon_gradient_lines"] = gluon_gradient_lines
    environment.globals["table_lines"] = table_lines
    environment.globals["table_numbers"] = table_numbers
    return environment


def parse_templates() -> None:
    """Parses the templates of all families ahead of the first kernel."""
    folder = Path(str(resources.files(PACKAGE)))
    for path in sorted(folder.rglob("*.jinja")):
        _environment().get_template(path.relative_to(folder).as_posix())


def _read_template(name: str) -> str:
    return resources.files(PACKAGE).joinpath(*name.split("/")).read_text(encoding="utf-8")


def _checked_values(values: Context, prefix: str = "") -> Context:
    return {name: _checked(prefix + name, value) for name, value in values.items()}


def _checked(name: str, value: object) -> object:
    """Rejects text: a stored table must not be able to insert code into a kernel."""
    if isinstance(value, (int, enum.Enum)):
        return value
    if isinstance(value, tuple):
        return tuple(_checked(name, item) for item in value)
    if isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            _checked(f"{name}.{field}", getattr(value, field))
        return value
    if isinstance(value, Mapping):
        return _checked_values(value, f"{name}.")
    raise KernelError(f"template values must be ints, bools or enums, and {name} is {type(value).__name__}")
