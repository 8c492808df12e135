# SPDX-License-Identifier: MIT
"""Tables of other tools that are keyed by a layer's exact class: convert makes stock's layers ours, and such a tool
would no longer know them. Opacus' validator would let a batch norm pass, torch.ao would leave observers out.

Where a tool has been imported, its tables have our classes as they have stock's. Tables of per-sample gradients are
left alone, since a layer may have an activation: Opacus derives those of classes that it does not know.
"""
from __future__ import annotations

import functools
import sys
from types import FunctionType
from typing import Any, Callable, Iterator

from torch import nn

from . import modules

_OURS = {getattr(nn, name): getattr(modules, name) for name in modules.__all__ if hasattr(nn, name)}
# Modules with tables, and what the tables are called; "": whatever has stock's classes in it.
_TABLES = {
    "torch.ao.quantization.quantization_mappings": "",
    "torch.ao.quantization.fuser_method_mappings": "",
    "opacus.validators.module_validator": "ModuleValidator",
    "thop.profile": "",
    "thop.fx_profile": "",
    "ptflops.pytorch_ops": "",
}


def _tables(name: str, owner: str) -> Iterator[Any]:
    module = sys.modules.get(name)
    if module is not None:
        for value in list(vars(getattr(module, owner) if owner else module).values()):
            if isinstance(value, (dict, set)):
                yield value


def _our_key(key: Any) -> Any:
    """The key with our class in the place of stock's; of fusions it is a tuple of classes, which may be nested."""
    if isinstance(key, tuple):
        return tuple(map(_our_key, key))
    return _OURS.get(key, key) if isinstance(key, type) else key


def _of_plain_layers(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes another layer of one may not lose its activation."""

    @functools.wraps(function)
    def checked(layer: nn.Module, *args: Any, **keywords: Any) -> Any:
        modules.refuse_activation(layer, function.__qualname__)
        return function(layer, *args, **keywords)

    return checked


def add_classes() -> None:
    """Adds our classes to the tables of what has been imported; what someone else put there stays."""
    for name, owner in _TABLES.items():
        for table in _tables(name, owner):
            for key in list(table):
                ours = _our_key(key)
                if ours == key or ours in table:
                    continue
                if isinstance(table, set):
                    table.add(ours)
                    continue
                value = table[key]
                is_fixer = owner and table is getattr(sys.modules[name], owner).FIXERS
                table[ours] = _of_plain_layers(value) if is_fixer and isinstance(value, FunctionType) else value
