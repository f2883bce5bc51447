"""A container for layers with names that torch's ModuleDict refuses."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView
from urllib.parse import unquote

import torch

# ModuleDict refuses a module whose name is an attribute of this object.
_EMPTY = torch.nn.ModuleDict()


def name_in_state(name: str) -> str:
    """Return the name of a module, encoded as `LayersByName` describes."""
    name = name.replace("%", "%25").replace(".", "%2E")
    return f"%{ord(name[0]):02X}{name[1:]}" if name and hasattr(_EMPTY, name) else name


class LayersByName(torch.nn.ModuleDict):
    """A ModuleDict that also accepts names with dots and names of module attributes.

    Such names are percent-encoded in a state, where dots separate module names: ``"user.id"`` is
    ``user%2Eid``, and ``"type"`` is ``%74ype``. Other names are not changed.
    """

    def __getitem__(self, key: str) -> torch.nn.Module:
        return super().__getitem__(name_in_state(key))

    def __setitem__(self, key: str, module: torch.nn.Module) -> None:
        super().__setitem__(name_in_state(key), module)

    def __delitem__(self, key: str) -> None:
        super().__delitem__(name_in_state(key))

    def __contains__(self, key: str) -> bool:
        return super().__contains__(name_in_state(key))

    def __iter__(self) -> Iterator[str]:
        return map(unquote, self._modules)

    def keys(self) -> KeysView[str]:
        """Return the names as given, not encoded."""
        return dict.fromkeys(self).keys()

    def items(self) -> ItemsView[str, torch.nn.Module]:
        """Return the names as given, not encoded, with the modules."""
        return dict(zip(self, self.values(), strict=True)).items()
