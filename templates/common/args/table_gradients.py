"""Triton code that sums the gradients of captured tensors, where queries stay and keys are walked.

`dtables` is described in `flashtune.core.features.table_gradients`, which splits or sums it.
"""

from collections.abc import Callable

from flashtune.core.expressions.derivative import Derivatives, is_of_rows
from flashtune.core.features.records import TABLES
from flashtune.templates.common.args.function_lines import Writer


def table_lines(functions: Derivatives, part: str, *, deterministic: bool) -> str:
    """Returns lines of code that sum gradients of captured tensors.

    Args:
        functions: The typed expressions.
        part: "count", which makes `table_numbers`, the elements of `dtables`. "start" for lines before the
            loop over keys, "block" for those of a block, which need `ds`, and "end" for those after the loop.
        deterministic: Whether `dtables` has the gradient of each load.
    """
    if not functions.elements:
        return ""
    writer = (_Loads if deterministic else _Atomics)(functions)
    lines: Callable[[], list[str]] = getattr(writer, part)
    return "\n".join(lines())


def table_numbers(functions: Derivatives, deterministic: bool) -> str:
    """Returns the expression of the host for the number of elements of `dtables`."""
    if not deterministic:
        return " + ".join(f"{TABLES[place]}.numel()" for place in functions.trained) or "0"
    rows = sum(is_of_rows(functions, element) for element in functions.elements)
    return f"batch * heads * ({rows} + {len(functions.elements) - rows} * k.shape[2]) * seqlen_q"


class _Sums(Writer):
    """Sums over the keys of a row, for loads with an index that does not depend on the key."""

    def __init__(self, functions: Derivatives) -> None:
        super().__init__(functions)
        self.elements = functions.elements

    def start(self) -> list[str]:
        """Returns the lines that make the sums."""
        return [
            f"element_{number} = tl.zeros([BLOCK_M], tl.float32)"
            for number, element in enumerate(self.elements)
            if is_of_rows(self.functions, element)
        ]

    def block(self) -> list[str]:
        """Returns the lines of a block."""
        lines = []
        written = [self.functions.score]
        for number, element in enumerate(self.elements):
            lines += self.of_blocks(element.slope, *written)
            written.append(element.slope)
            slope = self.operand(element.slope, 3)
            # The derivative by an element may be infinite where the key is hidden.
            lines.append(f"change = tl.where((ds != 0.0) & query_exists[:, None], ds * {slope}, 0.0)")
            if is_of_rows(self.functions, element):
                lines.append(f"element_{number} += tl.sum(change, 1)")
            else:
                lines.append(self.add(number))
        return lines

    def add(self, number: int) -> str:
        """Returns the line that adds or stores `change` for a load."""
        raise NotImplementedError


class _Atomics(_Sums):
    """Additions to the elements themselves."""

    def count(self) -> list[str]:
        """Returns the lines that make `table_numbers`."""
        lines = ["table_numbers = tl.full((), 0, tl.int64)"]
        for place in self.functions.trained:
            lines += [*self.numbers(place), f"table_numbers += numbers_{place}_0"]
        return lines

    def start(self) -> list[str]:
        """Returns the lines that make the places of gradients and the sums."""
        lines, base, trained = [], "dtables", self.functions.trained
        for place in trained:
            # The number of all elements is the place of the next table.
            numbers = self.numbers(place)[: None if place != trained[-1] else -1]
            lines += [*numbers, f"gradient_{place} = {base}"]
            base = f"gradient_{place} + numbers_{place}_0.to(tl.int64)"
        return [*lines, *super().start()]

    def add(self, number: int) -> str:
        """Returns the line that adds `change` to the elements of a load."""
        load = self.elements[number].load
        if self.forms[load] == 2:
            return self._atomic(load, 2, "tl.sum(change, 0)", "keys < seqlen_kv")
        return self._atomic(load, 3, "change", "change != 0.0")

    def end(self) -> list[str]:
        """Returns the lines that add the sums of rows."""
        return [
            self._atomic(element.load, 1, f"element_{number}", "query_exists")
            if self.forms[element.load] == 1
            else self._atomic(element.load, 0, f"tl.sum(element_{number})", "")
            for number, element in enumerate(self.elements)
            if is_of_rows(self.functions, element)
        ]

    def numbers(self, table: int) -> list[str]:
        """Returns the lines that count the elements of a table from each axis on."""
        return super().numbers(table) or [f"numbers_{table}_0 = tl.full((), 1, tl.int32)"]

    def _atomic(self, load: int, form: int, value: str, mask: str) -> str:
        operands = [self.operand(index, form) for index in self.functions.nodes[load].operands]
        at = self.gradient_place(load, operands)
        return f'tl.atomic_add({at}, {value}{f", mask={mask}" if mask else ""}, sem="relaxed")'


class _Loads(_Sums):
    """Stores of the gradient of each load."""

    def count(self) -> list[str]:
        """Returns the lines that make `table_numbers`."""
        rows = "(tl.num_programs(0) // tiles).to(tl.int64)"
        return [f"table_numbers = {rows} * {self._size()}"]

    def start(self) -> list[str]:
        """Returns the lines that make the places of gradients and the sums."""
        size = self._size()
        lines = [f"gradient_0 = dtables + (sequence * heads + head).to(tl.int64) * {size}"]
        for number in range(1, len(self.elements)):
            rows = is_of_rows(self.functions, self.elements[number - 1])
            step = "seqlen_q" if rows else "tl.cast(seqlen_q, tl.int64) * seqlen_kv"
            lines.append(f"gradient_{number} = gradient_{number - 1} + {step}")
        return [*lines, *super().start()]

    def add(self, number: int) -> str:
        """Returns the line that stores `change`."""
        at = f"gradient_{number} + queries.to(tl.int64)[:, None] * seqlen_kv + keys[None, :]"
        return f"tl.store({at}, change, mask=query_exists[:, None] & (keys < seqlen_kv)[None, :])"

    def end(self) -> list[str]:
        """Returns the lines that store the sums of rows."""
        return [
            f"tl.store(gradient_{number} + queries, element_{number}, mask=query_exists)"
            for number, element in enumerate(self.elements)
            if is_of_rows(self.functions, element)
        ]

    def _size(self) -> str:
        """Returns the numbers of one head of a sequence."""
        rows = sum(is_of_rows(self.functions, element) for element in self.elements)
        pairs = len(self.elements) - rows
        return f"(({rows} + {pairs} * seqlen_kv) * tl.cast(seqlen_q, tl.int64))"
