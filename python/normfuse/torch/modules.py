# SPDX-License-Identifier: MIT
"""Layers: PyTorch's normalization modules with normfuse underneath.

Each class is a subclass of the stock class of its name, where torch has one: the same constructor, parameters, buffers
and `state_dict`, so that checkpoints load both ways, and `isinstance` holds. Three keywords are added for the
activation that the layer applies to its own output, `activation`, `act_param` and `num_parameters`; `repr` shows them
where they are set. With activation="prelu" the layer has one parameter more, `slope`, [num_parameters], which is 1 or
the number of channels. It begins at 0.25, and is what torch.nn.PReLU calls `weight`.

A layer is called as its stock class is, and takes the tensors that can be fused into the call as further keywords:

    u = input [+ pre_bias] [+ pre_add]
    z = normalized(u) * weight + bias [* (1 + scale) + shift] [+ post_add]
    y = activation(z)

    input                      [N, C, spatial...]; f64, f32, f16 or bf16, whatever the parameters' dtype
    pre_bias                   [C], [N, C] or [N, C, 1, ...]
    pre_add, post_add          input's shape; converted to input's dtype
    scale, shift               [N, C] or [N, C, 1, ...]         (GroupNorm, ChannelNorm)
    return_sum=True            gives (y, u); needs pre_bias or pre_add
    activation, act_param,     those of this call, where the layer has none of its own;
    slope                      slope is prelu's, [C] or [1], of any of the dtypes

The output has input's shape, dtype and memory layout. What stock rejects is rejected with stock's message: the checks
are stock's own. Beyond them a ValueError says that an activation is not known, that it was given twice, that act_param
or slope means nothing to it, or that slope is missing or does not fit; a RuntimeError that an added tensor does not
fit.

While training, a batch norm that is called inside a backward pass leaves its running statistics as they are: that call
recomputes what torch.utils.checkpoint did not keep, and the statistics saw the batch the first time.

To torch.fx.symbolic_trace a layer is a leaf, as stock's are. torch.jit.trace takes layers, torch.jit.script does not.
"""
from __future__ import annotations

import sys
import types
import warnings
from typing import Any, Optional, Union

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.overrides import has_torch_function_variadic

from . import functional

__all__ = ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "ChannelAffine", "ChannelNorm", "GroupNorm", "InstanceNorm1d",
           "InstanceNorm2d", "InstanceNorm3d", "LayerNorm2d", "RMSNorm2d", "SyncBatchNorm"]

_SLOPE = 0.25  # torch.nn.PReLU's
_Output = Union[Tensor, tuple[Tensor, Tensor]]

_REFUSALS = (RuntimeError, TypeError, ValueError, KeyError)  # what functional's norms look into
_graph_task = torch._C._current_graph_task_id
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


def is_traced(layer: torch.nn.Module, input: Any) -> bool:
    """True if the input stands for a tensor in a trace by torch.fx, and not of this layer alone."""
    return isinstance(input, Proxy) and input.tracer.root is not layer


def leaf(layer: torch.nn.Module, input: Proxy, **others: Any) -> Proxy:
    """The layer's call as a node of the graph that torch.fx makes."""
    given = {name: value for name, value in others.items() if value is not None and value is not False}
    return input.tracer.create_proxy("call_module", input.tracer.path_of_module(layer), (input,), given)


def _recomputes() -> bool:
    """True if a backward pass runs on this thread: a forward in it is that of a checkpoint, once more."""
    return not _is_dynamo_compiling() and _graph_task() != -1


# Places of torch's functions that make another layer of a norm.
_MAKERS = ("torch.nn.", "torch.ao.", "torch.fx.experimental.")


def refuse_activation(layer: torch.nn.Module, maker: str) -> None:
    """Raises where a function that makes another layer of this one would leave its activation out."""
    activation = getattr(layer, "activation", None)
    if activation is not None:
        raise TypeError(f"{maker} knows nothing of the activation, {activation!r}, of a normfuse.torch."
                        f"{type(layer).__name__}, and would leave it out: give it a layer without one. "
                        "normfuse.torch.SyncBatchNorm.convert_sync_batchnorm keeps it")


class _Activated:
    """The two attributes that every layer has beyond its stock class.

    The defaults stand in the class so that a stock object whose `__class__` becomes one of these (as convert does, and
    as a pickle of an older model may) has them without an entry in its `__dict__`.
    """

    activation: Optional[str] = None
    act_param: Optional[float] = None

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Gives a public class functions of its own name, which is what Python's messages about arguments say."""
        super().__init_subclass__(**keywords)
        for name in ("__init__", "forward"):
            shared = getattr(cls, name, None)
            if not cls.__name__.startswith("_") and shared.__qualname__.startswith("_") and name not in cls.__dict__:
                own = types.FunctionType(shared.__code__, shared.__globals__, name, shared.__defaults__,
                                         shared.__closure__)
                own.__kwdefaults__, own.__annotations__ = shared.__kwdefaults__, shared.__annotations__
                own.__doc__, own.__module__ = shared.__doc__, cls.__module__
                own.__qualname__ = f"{cls.__qualname__}.{name}"
                setattr(cls, name, own)

    def _set_activation(self, activation: Optional[str], act_param: Optional[float], num_parameters: int = 1,
                        channels: int = 1, device: Any = None, dtype: Any = None) -> None:
        functional._activation(activation, act_param)
        if activation is not None:
            self.activation = activation
        if act_param is not None:
            self.act_param = float(act_param)
        if activation == "prelu":
            if num_parameters not in (1, channels):
                raise ValueError(f"num_parameters must be 1 or the number of channels, {channels}, but got "
                                 f"{num_parameters}")
            self.slope = torch.nn.Parameter(torch.full((num_parameters,), _SLOPE, device=device, dtype=dtype))
        elif num_parameters != 1:
            raise ValueError(f"num_parameters is prelu's, but activation is {activation!r}")

    def _of_this_call(self, activation: Optional[str], act_param: Optional[float],
                      slope: Optional[Tensor]) -> tuple[Optional[str], Optional[float], Optional[Tensor]]:
        if activation is None and act_param is None and slope is None:
            return self.activation, self.act_param, self.slope if self.activation == "prelu" else None
        if self.activation is not None:
            given = (f"activation={activation!r}" if activation is not None else
                     f"act_param={act_param}" if act_param is not None else "slope")
            raise ValueError(f"{given} was given to a layer that has its own, {self.activation!r}")
        return activation, act_param, slope

    def _reset_slope(self) -> None:
        if self.activation == "prelu":
            torch.nn.init.constant_(self.slope, _SLOPE)

    def __prepare_scriptable__(self) -> Any:
        raise RuntimeError(f"torch.jit.script cannot compile normfuse's {type(self).__name__}: use torch.jit.trace or "
                           "torch.export, or first normfuse.torch.revert(model) where convert made it")

    def _activation_repr(self) -> str:
        text = "" if self.activation is None else f", activation={self.activation!r}"
        text += "" if self.act_param is None else f", act_param={self.act_param}"
        return text if self.activation != "prelu" else f"{text}, num_parameters={self.slope.numel()}"

    def extra_repr(self) -> str:
        return super().extra_repr() + self._activation_repr()  # type: ignore[misc]


def _guarded(name: str) -> property:
    """An attribute that a layer's forward does not read, and that torch's functions do which make another layer of it:
    of a layer with an activation they may not.

    It is none that forward finds in __dict__: there Dynamo, before PyTorch 2.14, takes the property for the entry."""

    def read(layer: torch.nn.Module) -> Any:
        if layer.activation is not None and not _is_dynamo_compiling():
            caller = sys._getframe(1)
            if caller.f_globals.get("__name__", "").startswith(_MAKERS) and caller.f_locals.get("self") is not layer:
                refuse_activation(layer, f"torch's {caller.f_code.co_name}")
        for place in (layer.__dict__, layer._buffers):
            if name in place:
                return place[name]
        raise AttributeError(name)

    def write(layer: torch.nn.Module, value: Any) -> None:
        layer.__dict__[name] = value

    return property(read, write)


class _Norm(_Activated):
    """A layer whose stock class has eps, and parameters to reset.

    torch has functions that make another layer of any norm (fuse_conv_bn_eval, SyncBatchNorm.convert_sync_batchnorm,
    quantized layers), and would leave an activation of the layer's own out. They read affine, or a batch norm's
    running_var.
    """

    affine = _guarded("affine")

    def reset_parameters(self) -> None:
        super().reset_parameters()  # type: ignore[misc]
        self._reset_slope()


class GroupNorm(_Norm, torch.nn.GroupNorm):
    """torch.nn.GroupNorm (Wu and He 2018, arXiv:1803.08494) with a fused activation, residuals and AdaGN's scale and
    shift, and statistics over the strips of an image that is cut over processes.

    Args:
        num_groups, num_channels, eps, affine, device, dtype, bias: as torch.nn.GroupNorm's.
        activation: None or the name of an activation of normfuse.torch.group_norm.
        act_param: leaky_relu's slope (0.01) or elu's alpha (1.0).
        num_parameters: prelu's: the layer's parameter slope is [num_parameters], 1 or num_channels. It begins at 0.25.
        process_group, sharded_dim: the input is one strip of an image that the processes of `process_group` (None: all)
            hold together. It is cut along axis `sharded_dim` (2 or more, or negative) in rank order. Strips may differ
            in size and be empty; the other sizes are equal. Every process gets the same mean and rstd, to the bit, and
            the output of its strip. Gradients of weight, bias, scale, shift and pre_bias are this strip's: sum
            them over the processes. sharded_dim=None (the default): the input is whole, and process_group must be None.

    Call:
        layer(input, *, pre_bias=None, pre_add=None, return_sum=False, post_add=None, scale=None, shift=None,
        activation=None, act_param=None, slope=None) with input [N, C, spatial...] of any number of spatial axes; the
        others and what is returned as of normfuse.torch.group_norm.

    Raises:
        ValueError: num_groups does not divide num_channels; a group of the input has one value; activation,
            act_param, num_parameters or slope is not known, does not fit or was given twice; process_group without
            sharded_dim.
        RuntimeError: the input has other channels, or another tensor does not fit it.
    """

    process_group: Optional[Any] = None
    sharded_dim: Optional[int] = None

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, device: Any = None,
                 dtype: Any = None, *, activation: Optional[str] = None, act_param: Optional[float] = None,
                 num_parameters: int = 1, process_group: Optional[Any] = None, sharded_dim: Optional[int] = None,
                 **stock: Any) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device, dtype, **stock)
        self._set_activation(activation, act_param, num_parameters, num_channels, device, dtype)
        if sharded_dim is None and process_group is not None:
            raise ValueError("process_group without sharded_dim: say which axis of the input is cut over the processes")
        if sharded_dim is not None:
            if sharded_dim in (0, 1):
                raise ValueError(f"sharded_dim must be a spatial axis, 2 or more, but got {sharded_dim}")
            self.sharded_dim = sharded_dim
            self.process_group = process_group

    def forward(self, input: Tensor, *, pre_bias: Optional[Tensor] = None, pre_add: Optional[Tensor] = None,
                return_sum: bool = False, post_add: Optional[Tensor] = None, scale: Optional[Tensor] = None,
                shift: Optional[Tensor] = None, activation: Optional[str] = None, act_param: Optional[float] = None,
                slope: Optional[Tensor] = None) -> _Output:
        if type(input) is not Tensor and is_traced(self, input):
            return leaf(self, input, pre_bias=pre_bias, pre_add=pre_add, return_sum=return_sum,
                        post_add=post_add, scale=scale, shift=shift, activation=activation, act_param=act_param,
                        slope=slope)
        if activation is None and act_param is None and self.activation != "prelu":
            activation, act_param = self.activation, self.act_param
        elif self.activation is not None:
            activation, act_param, slope = self._of_this_call(activation, act_param, slope)
        try:  # torch.nn.Module's search for an attribute would take half a microsecond for each
            parameters = self._parameters
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:  # parametrized, or a replica
            weight, bias = self.weight, self.bias
        eps = self.eps
        if pre_bias is None and pre_add is None and post_add is None and scale is None and shift is None and \
                slope is None and not return_sum and self.sharded_dim is None and type(input) is Tensor and \
                not has_torch_function_variadic(input, weight, bias):
            try:
                y = functional.group_norm_alone(input, weight, bias, self.num_groups, eps, activation, act_param)
            except _REFUSALS:
                functional.refused_group_norm(input, weight, bias, self.num_groups, activation)
                raise
            if y is not None:
                return y
        if self.sharded_dim is not None:
            from . import distributed
            return distributed.group_norm(input, self.num_groups, weight, bias, eps, sharded_dim=self.sharded_dim,
                                          process_group=self.process_group, activation=activation, act_param=act_param,
                                          slope=slope, pre_bias=pre_bias, pre_add=pre_add, return_sum=return_sum,
                                          post_add=post_add, scale=scale, shift=shift)
        return functional.group_norm(input, self.num_groups, weight, bias, eps, activation=activation,
                                     act_param=act_param, slope=slope, pre_bias=pre_bias, pre_add=pre_add,
                                     return_sum=return_sum, post_add=post_add, scale=scale, shift=shift)

    def _activation_repr(self) -> str:
        return super()._activation_repr() + ("" if self.sharded_dim is None else f", sharded_dim={self.sharded_dim}")


class _BatchNorm(_Norm):
    """The part that BatchNorm1d, 2d, 3d and SyncBatchNorm share: constructor, the statistics' bookkeeping, forward."""

    running_var = _guarded("running_var")

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: Optional[float] = 0.1, affine: bool = True,
                 track_running_stats: bool = True, device: Any = None, dtype: Any = None, *,
                 activation: Optional[str] = None, act_param: Optional[float] = None, num_parameters: int = 1,
                 **stock: Any) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype, **stock)
        self._set_activation(activation, act_param, num_parameters, num_features, device, dtype)

    def forward(self, input: Tensor, *, pre_bias: Optional[Tensor] = None, pre_add: Optional[Tensor] = None,
                return_sum: bool = False, post_add: Optional[Tensor] = None, activation: Optional[str] = None,
                act_param: Optional[float] = None, slope: Optional[Tensor] = None) -> _Output:
        if type(input) is not Tensor and is_traced(self, input):
            return leaf(self, input, pre_bias=pre_bias, pre_add=pre_add, return_sum=return_sum,
                        post_add=post_add, activation=activation, act_param=act_param, slope=slope)
        self._check_input_dim(input)
        momentum, eps, training = self.momentum, self.eps, self.training
        if activation is None and act_param is None and self.activation != "prelu":
            activation, act_param = self.activation, self.act_param
        elif self.activation is not None:
            activation, act_param, slope = self._of_this_call(activation, act_param, slope)
        try:  # see GroupNorm
            parameters, buffers = self._parameters, self._buffers
            weight, bias = parameters["weight"], parameters["bias"]
            running_mean, running_var = buffers["running_mean"], buffers["running_var"]
        except KeyError:
            weight, bias = self.weight, self.bias
            running_mean, running_var = self.running_mean, self.running_var
        if training:
            if not self.track_running_stats:
                running_mean = running_var = None
            elif not _is_dynamo_compiling() and _graph_task() != -1:  # as _recomputes()
                momentum = 0.0
            else:  # evaluation has no use for the counter, which layers of old files lack
                batches = (buffers["num_batches_tracked"] if "num_batches_tracked" in buffers else
                           self.num_batches_tracked)
                if batches is not None:
                    batches.add_(1)
                    if momentum is None:
                        momentum = 1.0 / float(batches)
        training = training or running_mean is None and running_var is None
        momentum = 0.0 if momentum is None else momentum
        if pre_bias is None and pre_add is None and slope is None and not return_sum and \
                type(input) is Tensor and not has_torch_function_variadic(
                    input, running_mean, running_var, weight, bias, post_add):
            try:
                y = functional.batch_norm_alone(input, running_mean, running_var, weight, bias, training, momentum, eps,
                                                activation, act_param, post_add)
            except _REFUSALS:
                functional.refused_batch_norm(input, running_mean, running_var, weight, bias, training, activation,
                                              None, None, post_add)
                raise
            if y is not None:
                return y
        return functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps,
                                     activation=activation,
                                     act_param=act_param, slope=slope, pre_bias=pre_bias, pre_add=pre_add,
                                     return_sum=return_sum, post_add=post_add)


class BatchNorm1d(_BatchNorm, torch.nn.BatchNorm1d):
    """torch.nn.BatchNorm1d (Ioffe and Szegedy 2015, arXiv:1502.03167) with a fused activation and residuals.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: as torch.nn.BatchNorm1d's.
        activation: None or the name of an activation of normfuse.torch.group_norm.
        act_param: leaky_relu's slope (0.01) or elu's alpha (1.0).
        num_parameters: prelu's: the layer's parameter slope is [num_parameters], 1 or num_features. It begins at 0.25.

    Call:
        layer(input, *, pre_bias=None, pre_add=None, return_sum=False, post_add=None, activation=None, act_param=None,
        slope=None) with input [N, C] or [N, C, L]; the others and what is returned as of normfuse.torch.batch_norm.
        Training takes the statistics of the batch and updates the running ones, but inside a backward pass (see
        normfuse.torch.modules).

    Raises:
        ValueError: the input has another number of axes, or one value a channel while training; activation,
            act_param, num_parameters or slope is not known, does not fit or was given twice.
        RuntimeError: the input has other channels, or another tensor does not fit it.
    """


class BatchNorm2d(_BatchNorm, torch.nn.BatchNorm2d):
    """torch.nn.BatchNorm2d (arXiv:1502.03167): input [N, C, H, W]; all else as of normfuse.torch.BatchNorm1d."""


class BatchNorm3d(_BatchNorm, torch.nn.BatchNorm3d):
    """torch.nn.BatchNorm3d (arXiv:1502.03167): input [N, C, D, H, W]; all else as of normfuse.torch.BatchNorm1d."""


class SyncBatchNorm(_BatchNorm, torch.nn.modules.batchnorm._BatchNorm):
    """torch.nn.SyncBatchNorm: while training, the statistics are those of the batches of all processes of
    `process_group` (None: all), on the CPU as well as on CUDA.

    DistributedDataParallel refuses a torch.nn.SyncBatchNorm on the CPU. So this is no subclass of that, but of
    torch.nn.modules.batchnorm._BatchNorm like that, with the same attributes, parameters, buffers and state_dict.

    Counts, means and sums of squares of all processes are gathered in double and merged in rank order, so every process
    has the same statistics to the bit. Batches may differ in size and be empty. Nothing waits for the device, with
    momentum=None neither. Gradients of weight and bias are those of this process's batch, as stock's are: what averages
    gradients over processes (DistributedDataParallel) averages them too.

    The constructor is the stock class's, with activation=None, act_param=None and num_parameters=1 added. Input [N, C]
    or [N, C, spatial...]; the call, what it returns and raises as of normfuse.torch.BatchNorm1d.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: Optional[float] = 0.1, affine: bool = True,
                 track_running_stats: bool = True, process_group: Optional[Any] = None, device: Any = None,
                 dtype: Any = None, *, activation: Optional[str] = None, act_param: Optional[float] = None,
                 num_parameters: int = 1, **stock: Any) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype,
                         activation=activation, act_param=act_param, num_parameters=num_parameters, **stock)
        self.process_group = process_group

    _check_input_dim = torch.nn.SyncBatchNorm._check_input_dim
    _check_non_zero_input_channels = torch.nn.SyncBatchNorm._check_non_zero_input_channels

    def forward(self, input: Tensor, *, pre_bias: Optional[Tensor] = None, pre_add: Optional[Tensor] = None,
                return_sum: bool = False, post_add: Optional[Tensor] = None, activation: Optional[str] = None,
                act_param: Optional[float] = None, slope: Optional[Tensor] = None) -> _Output:
        if type(input) is not Tensor and is_traced(self, input):
            return leaf(self, input, pre_bias=pre_bias, pre_add=pre_add, return_sum=return_sum,
                        post_add=post_add, activation=activation, act_param=act_param, slope=slope)
        from . import distributed
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        group = distributed.spanned(self.process_group, input) if self.training else None
        if group is None:
            return super().forward(input, pre_bias=pre_bias, pre_add=pre_add, return_sum=return_sum, post_add=post_add,
                                   activation=activation, act_param=act_param, slope=slope)
        running_mean = running_var = batches = None
        momentum = self.momentum
        try:  # see GroupNorm
            parameters, buffers = self._parameters, self._buffers
            weight, bias = parameters["weight"], parameters["bias"]
            mean, var = buffers["running_mean"], buffers["running_var"]
        except KeyError:
            weight, bias = self.weight, self.bias
            mean, var = self.running_mean, self.running_var
        if self.track_running_stats:
            running_mean, running_var = mean, var
            if _recomputes():
                momentum = 0.0
            else:
                count = self.num_batches_tracked
                count.add_(1)
                if momentum is None:
                    batches = count
        activation, act_param, slope = self._of_this_call(activation, act_param, slope)
        return distributed.batch_norm_over(group, input, running_mean, running_var, weight, bias,
                                           0.0 if momentum is None else momentum, self.eps, batches,
                                           activation, act_param, slope, pre_bias, pre_add, return_sum, post_add)

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_group: Optional[Any] = None) -> torch.nn.Module:
        """As torch.nn.SyncBatchNorm.convert_sync_batchnorm: every batch norm in `module`, stock's or ours, becomes a
        layer of this class with the same parameters and buffers (and activation); gives the module, or what took its
        place. timm's BatchNormAct2d becomes its SyncBatchNormAct and keeps drop and act. Another subclass with a
        forward of its own raises TypeError."""
        result = module
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            from ._rules import synchronized_class
            kind = synchronized_class(type(module), cls)
            if kind is None:
                raise TypeError(f"{type(module).__module__}.{type(module).__qualname__} is a batch norm with a forward "
                                "of its own, which a SyncBatchNorm does not have")
            result = kind(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats,
                          process_group=process_group)
            for name in ("activation", "act_param", "drop", "act"):
                if getattr(module, name, None) is not None:
                    setattr(result, name, getattr(module, name))
            for name in ("weight", "bias", *(["slope"] if result.activation == "prelu" else [])):
                result.register_parameter(name, getattr(module, name))
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                result.register_buffer(name, getattr(module, name))
            result.training = module.training
        for name, child in module.named_children():
            result.add_module(name, cls.convert_sync_batchnorm(child, process_group))
        return result


class _InstanceNorm(_Norm):
    """The part that InstanceNorm1d, 2d and 3d share. Input without a batch axis is taken as a batch of one."""

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: Optional[float] = 0.1, affine: bool = False,
                 track_running_stats: bool = False, device: Any = None, dtype: Any = None, *,
                 activation: Optional[str] = None, act_param: Optional[float] = None, num_parameters: int = 1,
                 **stock: Any) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **stock)
        self._set_activation(activation, act_param, num_parameters, num_features, device, dtype)

    def forward(self, input: Tensor, *, pre_bias: Optional[Tensor] = None, pre_add: Optional[Tensor] = None,
                return_sum: bool = False, post_add: Optional[Tensor] = None, activation: Optional[str] = None,
                act_param: Optional[float] = None, slope: Optional[Tensor] = None) -> _Output:
        if type(input) is not Tensor and is_traced(self, input):
            return leaf(self, input, pre_bias=pre_bias, pre_add=pre_add, return_sum=return_sum,
                        post_add=post_add, activation=activation, act_param=act_param, slope=slope)
        self._check_input_dim(input)
        unbatched = input.dim() == self._get_no_batch_dim()
        self._check_channels(input, 0 if unbatched else 1)
        if unbatched:
            input, pre_add, post_add = (None if t is None else t.unsqueeze(0) for t in (input, pre_add, post_add))
        activation, act_param, slope = self._of_this_call(activation, act_param, slope)
        output = functional.instance_norm(input, self.running_mean, self.running_var, self.weight, self.bias,
                                          self.training or not self.track_running_stats,
                                          0.0 if self.momentum is None or _recomputes() else self.momentum,
                                          self.eps, pre_bias=pre_bias, pre_add=pre_add,
                                          return_sum=return_sum, post_add=post_add, activation=activation,
                                          act_param=act_param, slope=slope)
        if not unbatched:
            return output
        return tuple(t.squeeze(0) for t in output) if return_sum else output.squeeze(0)

    def _check_channels(self, input: Tensor, axis: int) -> None:
        if input.size(axis) == self.num_features:
            return
        if self._parameters.get("weight") is not None:
            raise ValueError(f"expected input's size at dim={axis} to match num_features ({self.num_features}), "
                             f"but got: {input.size(axis)}.")
        warnings.warn(f"input's size at dim={axis} does not match num_features. You can silence this warning by not "
                      "passing in num_features, which is not used because affine=False", stacklevel=3)


class InstanceNorm1d(_InstanceNorm, torch.nn.InstanceNorm1d):
    """torch.nn.InstanceNorm1d (Ulyanov et al. 2016, arXiv:1607.08022) with a fused activation and residuals.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: as torch.nn.InstanceNorm1d's.
        activation: None or the name of an activation of normfuse.torch.group_norm.
        act_param: leaky_relu's slope (0.01) or elu's alpha (1.0).
        num_parameters: prelu's: the layer's parameter slope is [num_parameters], 1 or num_features. It begins at 0.25.

    Call:
        layer(input, *, pre_bias=None, pre_add=None, return_sum=False, post_add=None, activation=None, act_param=None,
        slope=None) with input [N, C, L] or [C, L]; the others and what is returned as of normfuse.torch.instance_norm.

    Raises:
        ValueError: the input has another number of axes, one value a channel, or, with affine, other channels;
            activation, act_param, num_parameters or slope is not known, does not fit or was given twice.
        RuntimeError: another tensor does not fit the input.
    """


class InstanceNorm2d(_InstanceNorm, torch.nn.InstanceNorm2d):
    """torch.nn.InstanceNorm2d (arXiv:1607.08022): input [N, C, H, W] or [C, H, W]; all else as of
    normfuse.torch.InstanceNorm1d."""


class InstanceNorm3d(_InstanceNorm, torch.nn.InstanceNorm3d):
    """torch.nn.InstanceNorm3d (arXiv:1607.08022): input [N, C, D, H, W] or [C, D, H, W]; all else as of
    normfuse.torch.InstanceNorm1d."""


class ChannelAffine(_Activated, torch.nn.Module):
    """y = activation(weight * x + bias [+ post_add]) per channel: a batch norm whose statistics never change, or the
    last step of FiLM (Perez et al. 2017, arXiv:1709.07871) with learned constants.

    Args:
        num_channels: C.
        bias: False: no bias.
        activation: None or the name of an activation of normfuse.torch.group_norm.
        act_param: leaky_relu's slope (0.01) or elu's alpha (1.0).
        num_parameters: prelu's: the layer's parameter slope is [num_parameters], 1 or num_channels. It begins at 0.25.
        device, dtype: of the parameters, weight [C] of ones, bias [C] of zeros, and slope.

    Call:
        layer(input, *, post_add=None, activation=None, act_param=None, slope=None) with input [N, C, spatial...]; gives
        a tensor of input's shape, dtype and layout.

    Raises:
        ValueError: activation, act_param, num_parameters or slope is not known, does not fit or was given twice.
        RuntimeError: the input has other channels, or post_add does not fit it.
    """

    def __init__(self, num_channels: int, *, bias: bool = True, activation: Optional[str] = None,
                 act_param: Optional[float] = None, num_parameters: int = 1, device: Any = None,
                 dtype: Any = None) -> None:
        super().__init__()
        self.num_channels = num_channels
        self.weight = torch.nn.Parameter(torch.empty(num_channels, device=device, dtype=dtype))
        self.register_parameter("bias", torch.nn.Parameter(torch.empty(num_channels, device=device, dtype=dtype))
                                if bias else None)
        self._set_activation(activation, act_param, num_parameters, num_channels, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.ones_(self.weight)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)
        self._reset_slope()

    def forward(self, input: Tensor, *, post_add: Optional[Tensor] = None, activation: Optional[str] = None,
                act_param: Optional[float] = None, slope: Optional[Tensor] = None) -> Tensor:
        if type(input) is not Tensor and is_traced(self, input):
            return leaf(self, input, post_add=post_add, activation=activation, act_param=act_param, slope=slope)
        activation, act_param, slope = self._of_this_call(activation, act_param, slope)
        return functional.channel_affine(input, self.weight, self.bias, post_add=post_add, activation=activation,
                                         act_param=act_param, slope=slope)

    def extra_repr(self) -> str:
        return f"{self.num_channels}, bias={self.bias is not None}{self._activation_repr()}"


class _ChannelNorm(_Activated, torch.nn.Module):
    """The part that ChannelNorm, LayerNorm2d and RMSNorm2d share: options, parameters, forward."""

    groups: int = 1
    statistics: str = "mean_and_variance"
    eps_kind: str = "added"
    dim: int = 1

    def _set_parameters(self, num_channels: int, eps: float, affine: bool, bias: bool, device: Any, dtype: Any) -> None:
        self.num_channels, self.eps = num_channels, eps
        for name, is_there in (("weight", affine), ("bias", affine and bias)):
            self.register_parameter(name, torch.nn.Parameter(
                torch.empty(num_channels, device=device, dtype=dtype)) if is_there else None)
        _ChannelNorm.reset_parameters(self)

    def reset_parameters(self) -> None:
        if self.weight is not None:
            torch.nn.init.ones_(self.weight)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)
        self._reset_slope()

    def forward(self, input: Tensor, *, pre_bias: Optional[Tensor] = None, pre_add: Optional[Tensor] = None,
                return_sum: bool = False, post_add: Optional[Tensor] = None, scale: Optional[Tensor] = None,
                shift: Optional[Tensor] = None, activation: Optional[str] = None, act_param: Optional[float] = None,
                slope: Optional[Tensor] = None, out_dtype: Optional[torch.dtype] = None,
                channels_last: bool = False) -> _Output:
        if type(input) is not Tensor and is_traced(self, input):
            return leaf(self, input, pre_bias=pre_bias, pre_add=pre_add, return_sum=return_sum, post_add=post_add,
                        scale=scale, shift=shift, activation=activation, act_param=act_param, slope=slope,
                        out_dtype=out_dtype, channels_last=channels_last)
        activation, act_param, slope = self._of_this_call(activation, act_param, slope)
        return functional.channel_norm(input, self.weight, self.bias, groups=self.groups, statistics=self.statistics,
                                       eps=self.eps, eps_kind=self.eps_kind, dim=self.dim, activation=activation,
                                       act_param=act_param, slope=slope, pre_bias=pre_bias, pre_add=pre_add,
                                       return_sum=return_sum, post_add=post_add, scale=scale, shift=shift,
                                       dtype=out_dtype, channels_last=channels_last)

    def extra_repr(self) -> str:
        text = f"{self.num_channels}, eps={self.eps}, affine={self.weight is not None}"
        for name in ("groups", "statistics", "eps_kind", "dim"):
            if getattr(self, name) != getattr(_ChannelNorm, name) and name not in vars(type(self)):
                text += f", {name}={getattr(self, name)!r}"
        return text + ("" if self.weight is None or self.bias is not None else ", bias=False") + self._activation_repr()


class ChannelNorm(_ChannelNorm):
    """Layer norm (Ba et al. 2016, arXiv:1607.06450) or RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467) over the
    channels of each position, with a fused activation, residuals and modulation.

    Args:
        num_channels: C.
        eps, groups, statistics, eps_kind, dim: as of normfuse.torch.channel_norm.
        affine: False: no weight and no bias.
        bias: False: no bias.
        activation: None or the name of an activation of normfuse.torch.group_norm.
        act_param: leaky_relu's slope (0.01) or elu's alpha (1.0).
        num_parameters: prelu's: the layer's parameter slope is [num_parameters], 1 or num_channels. It begins at 0.25.
        device, dtype: of the parameters, weight [C] of ones, bias [C] of zeros, and slope.

    Call:
        layer(input, *, pre_bias=None, pre_add=None, return_sum=False, post_add=None, scale=None, shift=None,
        activation=None, act_param=None, slope=None, out_dtype=None, channels_last=False) with input [N, C, spatial...],
        or [..., C] with dim=-1; out_dtype is dtype of normfuse.torch.channel_norm, and the others and what is returned
        are as there.

    Raises:
        ValueError: groups does not divide num_channels; statistics, eps_kind, activation, act_param, num_parameters or
            slope is not known, does not fit or was given twice; dim is neither 1 nor -1.
        RuntimeError: the input has other channels, or another tensor does not fit it.
    """

    def __init__(self, num_channels: int, eps: float = 1e-5, affine: bool = True, device: Any = None, dtype: Any = None,
                 *, groups: int = 1, statistics: str = "mean_and_variance", eps_kind: str = "added", bias: bool = True,
                 dim: int = 1, activation: Optional[str] = None, act_param: Optional[float] = None,
                 num_parameters: int = 1) -> None:
        super().__init__()
        functional._word("statistics", statistics, functional.STATISTICS)
        functional._word("eps_kind", eps_kind, functional.EPS_KINDS)
        if groups <= 0 or num_channels % groups != 0:
            raise ValueError(f"groups must divide num_channels, but got {groups} and {num_channels}")
        if dim not in (1, -1):
            raise ValueError(f"dim must be 1 or -1, but got {dim}")
        self.groups, self.statistics, self.eps_kind, self.dim = groups, statistics, eps_kind, dim
        self._set_parameters(num_channels, eps, affine, bias, device, dtype)
        self._set_activation(activation, act_param, num_parameters, num_channels, device, dtype)


class _Norm2d(_ChannelNorm):
    """With timm's arguments."""

    def __init__(self, num_channels: int, eps: float = 1e-6, affine: bool = True, device: Any = None, dtype: Any = None,
                 *, bias: bool = True, activation: Optional[str] = None, act_param: Optional[float] = None,
                 num_parameters: int = 1) -> None:
        torch.nn.Module.__init__(self)
        self._set_parameters(num_channels, eps, affine, bias, device, dtype)
        self._set_activation(activation, act_param, num_parameters, num_channels, device, dtype)


class LayerNorm2d(_Norm2d):
    """Layer norm over the channels of each position (arXiv:1607.06450): timm's and torchvision's layer of this name,
    with input [N, C, H, W], or [N, C, spatial...], of any layout.

    Args:
        num_channels: C.
        eps: added to the variance.
        affine, bias, activation, act_param, num_parameters, device, dtype: as of normfuse.torch.ChannelNorm.

    Call and raises: as of normfuse.torch.ChannelNorm.
    """


class RMSNorm2d(_Norm2d):
    """RMS norm over the channels of each position (arXiv:1910.07467), timm's RmsNorm2d: a weight and no bias. eps is
    added to the mean square; all else as of normfuse.torch.LayerNorm2d."""

    statistics = "mean_square"

    def __init__(self, num_channels: int, eps: float = 1e-6, affine: bool = True, device: Any = None, dtype: Any = None,
                 *, activation: Optional[str] = None, act_param: Optional[float] = None,
                 num_parameters: int = 1) -> None:
        super().__init__(num_channels, eps, affine, device, dtype, bias=False, activation=activation,
                         act_param=act_param, num_parameters=num_parameters)
