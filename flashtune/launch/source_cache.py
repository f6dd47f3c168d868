"""The kernel of a record, from a verified copy of its source if there is one.

A process that serves a tuned shape then does not import the template engine. The copy is the file that
`compilation.load_module` writes. It is used only if its digest is that of the record, so a file with modified
code is never used.
"""

from __future__ import annotations

from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.record import Record
from flashtune.launch.compilation import kernel_folder
from flashtune.templates.family import Family, kernel_of_source
from flashtune.templates.hashing import template_hash
from flashtune.templates.registry import find_family


def kernel_of(record: Record, specialization: Specialization) -> Kernel:
    """Returns the kernel of a record's config for tensors of a specialization.

    Raises:
        KernelError: The template rejects the config.
    """
    family = find_family(record.family)
    return _proven_copy(record, family, specialization) or _render(record, family, specialization)


def _render(record: Record, family: Family, specialization: Specialization) -> Kernel:
    from flashtune.templates.rendering import render

    assert record.config is not None
    return render(family, record.problem, record.config, specialization)


def _proven_copy(record: Record, family: Family, specialization: Specialization) -> Kernel | None:
    current = record.versions.template == template_hash(record.family)
    if (
        record.config is None
        or record.kernel is None
        or record.specialization != specialization
        or not current
    ):
        return None
    try:
        source = (kernel_folder() / f"{record.family}_{record.kernel}.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    kernel = kernel_of_source(family, record.problem, record.config, specialization, source)
    return kernel if kernel.digest == record.kernel else None
