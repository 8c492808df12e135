# SPDX-License-Identifier: MIT
"""What modules and functions of torch compute, as an activation of ours."""
from __future__ import annotations

from typing import Optional

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from . import functional

Choice = tuple[str, Optional[float]]  # activation, act_param

_MODULES = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Hardswish: "hardswish", nn.Mish: "mish", nn.ReLU6: "relu6"}
_FUNCTIONS = {F.relu: "relu", F.relu_: "relu", torch.relu: "relu", torch.relu_: "relu", F.silu: "silu",
              F.hardswish: "hardswish", F.mish: "mish", F.gelu: "gelu", F.leaky_relu: "leaky_relu",
              F.leaky_relu_: "leaky_relu", F.elu: "elu", F.elu_: "elu", F.relu6: "relu6"}
_METHODS = {"relu": "relu", "relu_": "relu"}
# The parameter of each function, by name and position.
_PARAMETERS = {"leaky_relu": "negative_slope", "elu": "alpha"}


def of_module(module: Optional[nn.Module]) -> Optional[Choice]:
    """What an activation module computes; None for any other."""
    kind = type(module)
    if kind in _MODULES:
        return _MODULES[kind], None
    if kind is nn.LeakyReLU:
        return "leaky_relu", float(module.negative_slope)
    if kind is nn.ELU:
        return "elu", float(module.alpha)
    if kind is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh", None
    return None


def of_node(node: torch.fx.Node) -> Optional[Choice]:
    """What a call of an activation function computes; None for any other, or where an argument is not a constant."""
    name = {"call_function": _FUNCTIONS, "call_method": _METHODS}.get(node.op, {}).get(node.target)
    if name is None:
        return None
    rest, kwargs = list(node.args[1:]), dict(node.kwargs)
    kwargs.pop("inplace", None)
    if name == "gelu":
        approximate = kwargs.pop("approximate", "none")
        return ({"none": "gelu", "tanh": "gelu_tanh"}[approximate], None) if not rest and not kwargs else None
    if name in _PARAMETERS:
        parameter = rest.pop(0) if rest else kwargs.pop(_PARAMETERS[name], None)
        rest = rest[1:]  # inplace
        if rest or kwargs or not isinstance(parameter, (int, float, type(None))):
            return None
        return name, None if parameter is None else float(parameter)
    return (name, None) if len(rest) <= 1 and not kwargs else None


def apply(z: Tensor, activation: Optional[str], act_param: Optional[float]) -> Tensor:
    return z if activation is None else functional.channel_affine(z, None, None, activation=activation,
                                                                  act_param=act_param)
