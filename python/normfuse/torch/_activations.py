# SPDX-License-Identifier: MIT
"""The activations of ours that modules and functions of torch compute."""
from __future__ import annotations

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import functional

# The keywords of a layer's call: activation (None for none), act_param, and slope where the activation is prelu.
Choice = dict[str, Any]

FUNCTIONS = {F.relu: "relu", F.relu_: "relu", torch.relu: "relu", torch.relu_: "relu", F.silu: "silu",
              F.hardswish: "hardswish", F.mish: "mish", F.gelu: "gelu", F.leaky_relu: "leaky_relu",
              F.leaky_relu_: "leaky_relu", F.elu: "elu", F.elu_: "elu", F.relu6: "relu6", F.prelu: "prelu"}
# The parameter of each function, by name and position.
_PARAMETERS = {"leaky_relu": "negative_slope", "elu": "alpha"}


def choice(activation: Optional[str], act_param: Optional[float] = None, **slope: Any) -> Choice:
    return {"activation": activation, "act_param": act_param, **slope}


# Modules that have no parameter; nobody writes to these.
SIMPLE = {nn.ReLU: choice("relu"), nn.SiLU: choice("silu"), nn.Hardswish: choice("hardswish"),
           nn.Mish: choice("mish"), nn.ReLU6: choice("relu6")}
MODULES = (*SIMPLE, nn.LeakyReLU, nn.ELU, nn.PReLU, nn.GELU)


def of_module(module: Optional[nn.Module]) -> Optional[Choice]:
    """The activation that a module computes; None for any other."""
    kind = type(module)
    if kind in SIMPLE:
        return SIMPLE[kind]
    if kind is nn.LeakyReLU:
        return choice("leaky_relu", float(module.negative_slope))
    if kind is nn.ELU:
        return choice("elu", float(module.alpha))
    if kind is nn.PReLU:
        return choice("prelu", slope=module.weight)
    if kind is nn.GELU:
        return choice("gelu" if module.approximate == "none" else "gelu_tanh")
    return None


def of_call(function: Any, rest: tuple[Any, ...], named: dict[str, Any]) -> Optional[Choice]:
    """The activation that function(tensor, *rest, **named) computes, of one of FUNCTIONS; None where an argument is not
    known."""
    name, rest, named = FUNCTIONS[function], list(rest), dict(named)
    named.pop("inplace", None)
    if name == "gelu":
        approximate = named.pop("approximate", "none")
        known = not rest and not named and approximate in ("none", "tanh")
        return choice("gelu" if approximate == "none" else "gelu_tanh") if known else None
    if name == "prelu":
        slope = rest.pop(0) if rest else named.pop("weight", None)
        return choice(name, slope=slope) if isinstance(slope, Tensor) and not rest and not named else None
    if name in _PARAMETERS:
        parameter = rest.pop(0) if rest else named.pop(_PARAMETERS[name], None)
        rest = rest[1:]  # inplace
        if rest or named or not isinstance(parameter, (int, float, type(None))):
            return None
        return choice(name, None if parameter is None else float(parameter))
    return choice(name) if len(rest) <= 1 and not named else None


def apply(z: Tensor, chosen: Choice) -> Tensor:
    if chosen["activation"] == "prelu":
        return F.prelu(z, chosen["slope"])  # which takes more shapes
    return z if chosen["activation"] is None else functional.channel_affine(z, None, None, **chosen)
