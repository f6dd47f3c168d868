"""`flashtune families`: the values of `--family`."""

import msgspec

from flashtune.tuner.cli.command import flashtune_command
from flashtune.tuner.cli.options import json_option
from flashtune.tuner.cli.output import print_json, print_rows

HEADS = ("family", "pass", "written in", "features")


class Described(msgspec.Struct, frozen=True):
    """A kernel family."""

    name: str  # Value of `--family`.
    direction: str  # `forward` or `backward`.
    language: str  # `triton`, or `gluon`, which Triton's interpreter does not run.
    features: tuple[str, ...]  # Features beyond shapes, types and causal masks.
    axes: tuple[str, ...]  # The tunable fields of its config.


@flashtune_command("families", "flashtune families", "flashtune families --json")
@json_option
def command(as_json: bool) -> None:
    """List the kernel families, with their pass, language and features.

    --json also has the fields of their configs.
    """
    from flashtune.templates.registry import families

    described = [
        Described(
            family.name,
            family.direction.value,
            "triton" if family.interpreted else "gluon",
            tuple(sorted(family.features)),
            family.config_type.__struct_fields__,
        )
        for family in families()
    ]
    if as_json:
        print_json(described)
    else:
        rows = [(row.name, row.direction, row.language, ", ".join(row.features)) for row in described]
        print_rows(HEADS, rows)
