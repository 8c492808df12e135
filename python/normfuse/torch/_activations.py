# SPDX-License-Identifier: MIT
"""What modules and functions of torch compute, as an activation of ours."""
from __future__ import annotations

from typing import Any, Optional

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from . import functional

# The keywords of a layer's call: activation (None for none), act_param, and slope where the activation is prelu.
Choice = dict[str, Any]

_MODULES = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Hardswish: "hardswish", nn.Mish: "mish", nn.ReLU6: "relu6"}
_FUNCTIONS = {F.relu: "relu", F.relu_: "relu", torch.relu: "relu", torch.relu_: "relu", F.silu: "silu",
              F.hardswish: "hardswish", F.mish: "mish", F.gelu: "gelu", F.leaky_relu: "leaky_relu",
              F.leaky_relu_: "leaky_relu", F.elu: "elu", F.elu_: "elu", F.relu6: "relu6", F.prelu: "prelu"}
_METHODS = {"relu": "relu", "relu_": "relu", "prelu": "prelu"}
# The parameter of each function, by name and position.
_PARAMETERS = {"leaky_relu": "negative_slope", "elu": "alpha"}


def choice(activation: Optional[str], act_param: Optional[float] = None, **slope: Any) -> Choice:
    return {"activation": activation, "act_param": act_param, **slope}


def of_module(module: Optional[nn.Module]) -> Optional[Choice]:
    """What an activation module computes; None for any other."""
    kind = type(module)
    if kind in _MODULES:
        return choice(_MODULES[kind])
    if kind is nn.LeakyReLU:
        return choice("leaky_relu", float(module.negative_slope))
    if kind is nn.ELU:
        return choice("elu", float(module.alpha))
    if kind is nn.PReLU:
        return choice("prelu", slope=module.weight)
    if kind is nn.GELU:
        return choice("gelu" if module.approximate == "none" else "gelu_tanh")
    return None


def of_node(node: torch.fx.Node) -> Optional[Choice]:
    """What a call of an activation function computes; None for any other, or where an argument is not a constant. The
    slope of prelu is a node that gets an attribute."""
    name = {"call_function": _FUNCTIONS, "call_method": _METHODS}.get(node.op, {}).get(node.target)
    if name is None:
        return None
    rest, kwargs = list(node.args[1:]), dict(node.kwargs)
    kwargs.pop("inplace", None)
    if name == "gelu":
        approximate = kwargs.pop("approximate", "none")
        return choice({"none": "gelu", "tanh": "gelu_tanh"}[approximate]) if not rest and not kwargs else None
    if name == "prelu":
        slope = rest.pop(0) if rest else kwargs.pop("weight", None)
        is_own = isinstance(slope, torch.fx.Node) and slope.op == "get_attr"
        return choice(name, slope=slope) if is_own and not rest and not kwargs else None
    if name in _PARAMETERS:
        parameter = rest.pop(0) if rest else kwargs.pop(_PARAMETERS[name], None)
        rest = rest[1:]  # inplace
        if rest or kwargs or not isinstance(parameter, (int, float, type(None))):
            return None
        return choice(name, None if parameter is None else float(parameter))
    return choice(name) if len(rest) <= 1 and not kwargs else None


def apply(z: Tensor, chosen: Choice) -> Tensor:
    if chosen["activation"] == "prelu":
        return F.prelu(z, chosen["slope"])  # which takes more shapes
    return z if chosen["activation"] is None else functional.channel_affine(z, None, None, **chosen)
