"""Finds a model's references to a layer or its weight, other than those that torch tracks."""

from __future__ import annotations

import dis
import functools
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

# Limit on the number of objects to search, since an attribute may lead to any number of objects.
# The search takes one object from each container in turn.
_MOST_OBJECTS = 100_000
# Types of objects that contain no other objects.
_ATOMS = (str, bytes, int, float, type(None), type, types.ModuleType)
# Attributes where torch keeps the parameters and submodules of a module.
_PARTS = ("_parameters", "_modules")


@dataclass(frozen=True)
class Reference:
    """A reference to an object from a place in a model, such as an attribute or a list item.

    Attributes:
        name: a Python expression for the place, starting at the model.
        get: reads the object.
        set: replaces the object; None if something else would also have to change.
    """

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], None] | None

    def item(self, name: str, container: Any, key: Any) -> Reference:
        """Return the reference to an item of the list or dict at this place."""
        write = None if self.set is None else functools.partial(container.__setitem__, key)
        return Reference(self.name + name, functools.partial(container.__getitem__, key), write)

    def attribute(self, name: str, owner: Any) -> Reference:
        """Return the reference to an attribute of `owner`, which is at this place or part of it."""
        write = None if self.set is None else functools.partial(setattr, owner, name)
        return Reference(f"{self.name}.{name}", functools.partial(getattr, owner, name), write)

    def element(self, i: int) -> Reference:
        """Return the reference to an element of a tuple; setting it replaces the whole tuple."""
        name, change = f"{self.name}[{i}]", self.set
        if change is None:
            return Reference(name, lambda: self.get()[i], None)

        def write(value: Any) -> None:
            elements = list(self.get())
            elements[i] = value
            kind = type(self.get())
            change(kind._make(elements) if hasattr(kind, "_make") else kind(elements))

        return Reference(name, lambda: self.get()[i], write)

    def within(self, name: str, value: Any) -> Reference:
        """Return the reference to a key or an element that cannot be replaced."""
        return Reference(f"{self.name}'s {name}", lambda: value, None)

    def fixed(self) -> Reference:
        """Return the same reference, but read-only."""
        return Reference(self.name, self.get, None)


def references(model: torch.nn.Module, layers: Iterable[Any]) -> dict[Any, list[Reference]]:
    """Find other references to these layers, their weights, and tensors that share their memory.

    The search covers attributes of modules, and from there lists, tuples, dicts, sets, attributes
    of objects, closures and defaults of functions. It leaves out the modules and parameters that
    torch itself tracks.

    Args:
        model: the model that is searched.
        layers: the layers to find, each with a weight.
    """
    of_layer = {id(part): layer for layer in layers for part in (layer, layer.weight)}
    of_memory = {_memory(layer.weight): layer for layer in layers}
    found: dict[Any, list[Reference]] = {layer: [] for layer in layers}
    containers = deque([] if not found else [_attributes_of_modules(model)])
    seen = {id(module) for module in model.modules()}
    looked_at = 0
    while containers and looked_at < _MOST_OBJECTS:
        place = next(containers[0], None)
        if place is None:
            containers.popleft()
            continue
        containers.rotate(-1)
        looked_at += 1
        value = place.get()
        if id(value) in of_layer:
            found[of_layer[id(value)]].append(place)
        elif isinstance(value, torch.Tensor):
            if (memory := _memory(value)) in of_memory:
                found[of_memory[memory]].append(place.fixed())
        elif isinstance(value, tuple):  # search a tuple again in every place that holds it
            containers.append(map(place.element, range(len(value))))
        elif id(value) not in seen:
            seen.add(id(value))
            containers.append(_inside(place, value))
    if containers:
        warnings.warn(
            f"replace_embeddings: the model leads to more than {_MOST_OBJECTS:,} objects, of which "
            f"the rest was not looked at; whatever else there uses a swapped layer or its weight "
            f"goes on with the old one",
            stacklevel=3,
        )
    return found


def readers(model: torch.nn.Module, layers: Iterable[Any]) -> dict[Any, list[str]]:
    """Find methods that read the weight of one of these layers by name, as in ``self.item.weight``.

    Methods whose names suggest initialization or a reset are left out.
    """
    found: dict[Any, list[str]] = {layer: [] for layer in layers}
    for module in model.modules():
        for name, chain in _chains(type(module)):
            part: Any = module
            for attribute in chain:
                part = getattr(part, "_modules", {}).get(attribute)
            if part in found:
                found[part].append(f"{type(module).__name__}.{name} reads {'.'.join(chain)}.weight")
    return {layer: list(dict.fromkeys(where)) for layer, where in found.items()}


def _memory(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory; 0 if the tensor has no memory."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse and some other tensors have no storage
        return 0


def _attributes_of_modules(model: torch.nn.Module) -> Iterator[Reference]:
    for path, module in model.named_modules():
        own = Reference(path, lambda: None, lambda value: None)
        for name in list(vars(module)):
            if name not in _PARTS:
                yield own.item(f".{name}" if path else name, vars(module), name)


def _inside(place: Reference, value: Any) -> Iterator[Reference]:
    """Yield the references inside the object at this place, one level deep."""
    if isinstance(value, torch.optim.Optimizer):
        place = place.fixed()  # keep the weight, since states are keyed by parameter
    if isinstance(value, _ATOMS):
        return
    if isinstance(value, list):
        for i, each in enumerate(value):
            if not isinstance(each, _ATOMS):
                yield place.item(f"[{i}]", value, i)
    elif isinstance(value, dict):
        for key, each in list(value.items()):
            if not isinstance(each, _ATOMS):
                yield place.item(f"[{key!r}]", value, key)
            if not isinstance(key, _ATOMS):
                yield place.within("key", key)
    elif isinstance(value, (set, frozenset)):
        for each in list(value):
            if not isinstance(each, _ATOMS):
                yield place.within("element", each)
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if cell != types.CellType():
                inside = place.attribute("cell_contents", cell)
                yield Reference(f"{name} in {place.name}", inside.get, inside.set)
        yield place.attribute("__defaults__", value)
        yield place.attribute("__kwdefaults__", value)
    elif isinstance(value, types.MethodType):
        yield place.attribute("__self__", value).fixed()
        yield place.attribute("__func__", value).fixed()
    elif isinstance(value, functools.partial):
        yield place.attribute("func", value).fixed()
        yield place.attribute("args", value).fixed()
        yield place.attribute("keywords", value).fixed()
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return
    for name in list(attributes):
        inside = place.item(f".{name}", attributes, name)
        hidden = isinstance(value, torch.nn.Module) and name == "_parameters"
        yield inside.fixed() if hidden else inside


def _chains(kind: type) -> Iterator[tuple[str, list[str]]]:
    """Yield each use of ``self.a.b.weight`` in a class: the method's name, and ``[a, b]``."""
    for of in kind.__mro__[: kind.__mro__.index(torch.nn.Module)]:
        for name, method in vars(of).items():
            code = getattr(method, "__code__", None)
            if code is None or not code.co_varnames or "init" in name or "reset" in name:
                continue
            yield from ((name, chain) for chain in _chains_in(code, code.co_varnames[0]))


def _chains_in(code: types.CodeType, own: str) -> Iterator[list[str]]:
    chain: list[str] | None = None
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            chain = [] if instruction.argval == own else None
        elif instruction.opname == "LOAD_ATTR" and chain is not None:
            if instruction.argval == "weight" and chain:
                yield chain
            chain = [*chain, instruction.argval]
        else:
            chain = None
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _chains_in(inner, own)
