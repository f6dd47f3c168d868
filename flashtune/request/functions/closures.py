"""The numbers that Python functions capture, and functions with other values in their place.

Captured are numbers in closures, defaults and `functools.partial`, and global numbers of their modules, also
of functions that these functions capture. Literals are no captured numbers.
"""

import functools
import math
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Containers that are searched.
_SEQUENCES = (tuple, list)
_IMMUTABLE = (str, bytes, type(None), complex, torch.dtype, torch.device, torch.Size)
# Packages of which modules, classes and functions do not change.
_LIBRARIES = frozenset({"torch", "math", "operator", "_operator", "builtins", "numpy", "functools", "typing"})
MAX_NESTED = 8
# Code objects of which names are kept.
MAX_CODES = 1024

_MISSING = object()

Replace = Callable[[float], object]


class _Stateful(Exception):  # noqa: N818 - not an error
    """A function captures an object with state that may change."""


def is_number(value: object) -> bool:
    """Returns whether a captured value becomes an argument of kernels."""
    if type(value) is int:
        return -(2**31) <= value < 2**31
    return type(value) is float and math.isfinite(value)


def replaced(function: Any, replace: Replace) -> Any:
    """Returns a function with captured numbers replaced by `replace(number)`."""
    return _replaced(function, replace, {}, 0)


class State(NamedTuple):
    """Captured values: functions with equal values compute the same from the same tensors."""

    values: tuple[object, ...]  # Tensors are identities, which are unique while all of them live.
    tensors: tuple[Tensor, ...]


def state(function: Any) -> State | None:
    """Returns the captured values, or None if the function captures an object that may change unseen."""
    found: list[object] = []
    tensors: list[Tensor] = []
    try:
        _collect(function, found, tensors, {}, 0)
    except _Stateful:
        return None
    return State(tuple(found), tuple(tensors))


class Captured(NamedTuple):
    """A function, held weakly, and the objects that it captures."""

    reference: "weakref.ref[types.FunctionType]"
    code: types.CodeType
    defaults: tuple[object, ...] | None
    keywords: dict[str, object] | None
    # The contents of its cells, and its globals by name. Functions are weak references there.
    contents: list[object]
    names: list[tuple[str, object]]

    def is_same(self) -> bool:
        """Returns whether the function lives and captures the same objects."""
        own = self.reference()
        if own is None or own.__code__ is not self.code:
            return False
        if own.__defaults__ is not self.defaults or own.__kwdefaults__ is not self.keywords:
            return False
        # Loops, because each call takes them.
        if self.contents:
            for cell, value in zip(own.__closure__ or (), self.contents, strict=True):
                try:
                    content = cell.cell_contents
                except ValueError:  # an empty cell
                    return False
                if content is not value and content is not _object(value):
                    return False
        if self.names:
            names = own.__globals__
            for name, value in self.names:
                content = names.get(name, _MISSING)
                if content is not value and content is not _object(value):
                    return False
        return True


def _held(value: object) -> object:
    """Returns a weak reference to a function, because functions may refer to each other. Others stay."""
    return weakref.ref(value) if isinstance(value, types.FunctionType) else value


def _object(value: object) -> object:
    """Returns the function of a weak reference, or the reference itself after the function's end."""
    function = value() if type(value) is weakref.ref else None
    return value if function is None else function


class Places(NamedTuple):
    """The functions that are called, and the tensors that they capture."""

    functions: list[Captured]
    tensors: list[Tensor]


def captured_places(functions: Sequence[types.FunctionType]) -> Places | None:
    """Returns where functions capture values, or None if a captured object may change unseen."""
    places = Places([], [])
    visited: set[int] = set()
    try:
        for function in functions:
            _find_places(function, places, visited)
    except _Stateful:
        return None
    return places


def _find_places(value: Any, places: Places, visited: set[int]) -> None:
    if isinstance(value, (int, float)) or _is_stable(value) or id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, Tensor):
        places.tensors.append(value)
        return
    if isinstance(value, types.FunctionType) and not value.__kwdefaults__ and not value.__dict__:
        cells = value.__closure__ or ()
        if any(map(_is_empty, cells)):
            raise _Stateful
        inside = [cell.cell_contents for cell in cells]
        names = _names_of(value.__code__) if _is_own(value) else ()
        read = [(name, value.__globals__.get(name, _MISSING)) for name in names]
        places.functions.append(
            Captured(
                weakref.ref(value),
                value.__code__,
                value.__defaults__,
                value.__kwdefaults__,
                [*map(_held, inside)],
                [(name, _held(part)) for name, part in read],
            )
        )
        contents = [*inside, *(value.__defaults__ or ()), *(part for _, part in read if part is not _MISSING)]
    elif isinstance(value, functools.partial) and not value.keywords:
        contents = [value.func, *value.args]
    elif type(value) is tuple:
        contents = [*value]
    else:
        raise _Stateful
    for part in contents:
        _find_places(part, places, visited)


def _globals_of(function: types.FunctionType) -> list[str]:
    """Returns the global names that a function reads."""
    return [name for name in _names_of(function.__code__) if name in function.__globals__]


@functools.lru_cache(MAX_CODES)
def _names_of(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names that code reads, with those of functions that it defines."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return (*code.co_names, *(name for part in inner for name in _names_of(part)))


def _is_own(function: object) -> bool:
    """Returns whether a function is the user's, and not torch's or Python's."""
    module = (getattr(function, "__module__", None) or "").partition(".")[0]
    return isinstance(function, types.FunctionType) and module not in ("torch", "math", "operator")


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises if empty
    except ValueError:
        return True
    return False


def _collect(
    value: object, found: list[object], tensors: list[Tensor], visited: dict[int, int], depth: int
) -> None:
    if isinstance(value, (int, float)):
        # As text: zeros of both signs are equal, and NaN is not.
        found.append((type(value), repr(value)))
    elif isinstance(value, Tensor):
        # Assignments to `data` change all of these.
        found.append((id(value), value.dtype, value.shape, value.stride()))
        tensors.append(value)
    elif _is_stable(value):
        found.append((type(value), value))
    elif id(value) in visited:
        found.append(visited[id(value)])
    elif depth > MAX_NESTED:
        raise _Stateful
    else:
        visited[id(value)] = len(visited)
        _collect_parts(value, found, tensors, visited, depth + 1)


def _collect_parts(
    value: object, found: list[object], tensors: list[Tensor], visited: dict[int, int], depth: int
) -> None:
    parts: list[object]
    if isinstance(value, types.FunctionType) and not value.__dict__:
        cells, defaults, keywords = (
            value.__closure__ or (),
            value.__defaults__ or (),
            value.__kwdefaults__ or {},
        )
        if any(map(_is_empty, cells)):
            raise _Stateful
        names = _globals_of(value) if _is_own(value) else []
        found.append((value.__code__, len(defaults), tuple(keywords), tuple(names)))
        parts = [cell.cell_contents for cell in cells]
        parts += [*defaults, *keywords.values(), *(value.__globals__[name] for name in names)]
    elif isinstance(value, functools.partial):
        found.append((functools.partial, len(value.args), tuple(value.keywords)))
        parts = [value.func, *value.args, *value.keywords.values()]
    elif _is_class_method(value) and _has_rule(value.__self__):  # type: ignore[attr-defined]
        # Its rule is traced instead, and its attributes are read by the rule alone.
        found.append(value)
        parts = [value.__self__.vmap]  # type: ignore[attr-defined]
    elif type(value) in _SEQUENCES:
        parts = [*value]  # type: ignore[misc]
        found.append((type(value), len(parts)))
    else:
        raise _Stateful
    for part in parts:
        _collect(part, found, tensors, visited, depth)


def _is_stable(value: object) -> bool:
    """Returns whether an object does not change. Attributes of the user's modules and classes may."""
    if isinstance(value, _IMMUTABLE):
        return True
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in _LIBRARIES
    if isinstance(value, types.BuiltinFunctionType):
        # Methods of objects are of this type too.
        return value.__self__ is None or (
            isinstance(value.__self__, (types.ModuleType, type)) and _is_stable(value.__self__)
        )
    return isinstance(value, type) and value.__module__.partition(".")[0] in _LIBRARIES


def _is_class_method(value: object) -> bool:
    return isinstance(value, types.MethodType) and isinstance(value.__self__, type)


def _has_rule(value: type) -> bool:
    """Returns whether a class is an autograd function with a rule for `vmap`."""
    base = torch.autograd.Function
    return issubclass(value, base) and value.vmap is not base.vmap


def _batched(function: Any, *arguments: Any) -> Any:
    """Returns the result of an autograd function's rule for `vmap`, under which torch evaluates functions.

    The forward pass may call operators of other libraries.
    """
    return function.vmap(None, (0,) * len(arguments), *arguments)[0]


def _replaced(value: Any, replace: Replace, made: dict[int, Any], depth: int) -> Any:
    if is_number(value):
        return replace(value)
    if id(value) in made:
        return made[id(value)]
    if _is_class_method(value) and value.__name__ == "apply" and _has_rule(value.__self__):
        return functools.partial(_batched, value.__self__)
    if isinstance(value, type) and _has_rule(value):
        return types.SimpleNamespace(apply=functools.partial(_batched, value))
    if depth > MAX_NESTED:
        return value

    def again(part: Any) -> Any:
        return _replaced(part, replace, made, depth + 1)

    if isinstance(value, functools.partial):
        keywords = {name: again(part) for name, part in value.keywords.items()}
        return functools.partial(again(value.func), *map(again, value.args), **keywords)
    if type(value) in _SEQUENCES:
        return type(value)(map(again, value))
    if not _is_own(value) and not (isinstance(value, types.FunctionType) and value.__closure__):
        return value
    # The new function exists before its parts, which may refer to it.
    own = types.FunctionType(
        value.__code__,
        dict(value.__globals__),
        value.__name__,
        None,
        tuple(types.CellType() for _ in value.__closure__ or ()),
    )
    made[id(value)] = own
    own.__dict__.update(value.__dict__)
    for cell, new in zip(value.__closure__ or (), own.__closure__ or (), strict=True):
        if not _is_empty(cell):
            new.cell_contents = again(cell.cell_contents)
    own.__defaults__ = None if value.__defaults__ is None else tuple(map(again, value.__defaults__))
    own.__kwdefaults__ = {name: again(part) for name, part in (value.__kwdefaults__ or {}).items()} or None
    if _is_own(value):
        for name in _globals_of(value):
            own.__globals__[name] = again(value.__globals__[name])
    return own
