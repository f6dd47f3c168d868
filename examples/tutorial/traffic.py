"""Records the accesses of a Triton kernel to global memory, in the interpreter."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor


class Access(NamedTuple):
    """One load or store of a tile, without the elements that its mask hides.

    Attributes:
        kind: "read" or "write".
        address: Address of the first element, in bytes.
        values: The values, of one dimension.
    """

    kind: str
    address: int
    values: np.ndarray[Any, Any]


class Traffic(list[Access]):
    """The accesses of a launch, in order, and the tensors that they may be in."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, Tensor] = {}

    def name(self, access: Access) -> str:
        """Returns the name of the tensor of an access, or "state" for a workspace of the kernel."""
        for name, tensor in self.tensors.items():
            if 0 <= access.address - tensor.data_ptr() < tensor.nbytes:
                return name
        return "state"

    def row(self, access: Access) -> int:
        """Returns the row of the first element in its tensor, which is contiguous."""
        tensor = self.tensors[self.name(access)]
        return (access.address - tensor.data_ptr()) // (tensor.element_size() * tensor.shape[-1])

    def elements(self) -> dict[str, int]:
        """Returns the number of elements by kind and tensor, as `{"read q": 32}`."""
        counts: Counter[str] = Counter()
        for access in self:
            counts[f"{access.kind} {self.name(access)}"] += access.values.size
        return dict(counts)

    def total(self) -> int:
        """Returns the number of elements of all accesses."""
        return sum(access.values.size for access in self)

    def table(self) -> str:
        """Returns a line for each step: its reads, and the writes after them, in elements."""
        steps: list[Counter[str]] = []
        last = "write"
        for access in self:
            if last == "write" and (access.kind == "read" or not steps):
                steps.append(Counter())
            steps[-1][f"{access.kind} {self.name(access)}"] += access.values.size
            last = access.kind
        return "\n".join(
            f"{number:2}  {', '.join(f'{name} {size}' for name, size in step.items())}"
            for number, step in enumerate(steps, 1)
        )


@contextmanager
def recorded() -> Iterator[Traffic]:
    """Records the accesses of kernels that run in the context. They need TRITON_INTERPRET=1."""
    from triton.runtime.interpreter import interpreter_builder as builder

    traffic = Traffic()
    load, store = builder.create_masked_load, builder.create_masked_store

    def add(kind: str, addresses: Any, values: Any, mask: Any) -> None:
        visible = mask.data.astype(bool)
        if visible.any():
            first = int(addresses.data[visible].min())
            traffic.append(Access(kind, first, values.data[visible].copy()))

    def recording_load(addresses: Any, mask: Any, *options: Any) -> Any:
        values = load(addresses, mask, *options)
        add("read", addresses, values, mask)
        return values

    def recording_store(addresses: Any, values: Any, mask: Any, *options: Any) -> Any:
        add("write", addresses, values, mask)
        return store(addresses, values, mask, *options)

    builder.create_masked_load, builder.create_masked_store = recording_load, recording_store
    try:
        yield traffic
    finally:
        del builder.create_masked_load, builder.create_masked_store
