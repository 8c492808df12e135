# SPDX-License-Identifier: MIT
"""Layers for `kernels.kernelize`: each forward takes the place of that of PyTorch's class of its name, and reads the
parameters, buffers and options of that class. Results are those of normfuse.torch's layers without activation."""
from typing import Optional, Tuple

from torch import Tensor, nn

from .torch import distributed, functional, modules

__all__ = ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "GroupNorm", "InstanceNorm1d", "InstanceNorm2d",
           "InstanceNorm3d",
           "LayerNorm", "RMSNorm", "SyncBatchNorm"]


class GroupNorm(nn.Module):
    has_backward: bool = True
    can_torch_compile: bool = True

    def forward(self, input: Tensor) -> Tensor:
        return functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


def _counted(layer: nn.Module) -> Tuple[float, Optional[Tensor]]:
    """The momentum of this batch, after it was counted; the count, where the running statistics are the average over
    all batches. As of normfuse.torch, a batch that a checkpoint recomputes is not counted again."""
    momentum = 0.0 if layer.momentum is None else layer.momentum
    count = layer.num_batches_tracked
    if not (layer.training and layer.track_running_stats) or count is None:
        return momentum, None
    if modules._recomputes():
        return 0.0, None
    count.add_(1)
    return momentum, count if layer.momentum is None else None


def _batch_norm(layer: nn.Module, input: Tensor) -> Tensor:
    momentum, count = _counted(layer)
    is_tracked = not layer.training or layer.track_running_stats
    mean, var = (layer.running_mean, layer.running_var) if is_tracked else (None, None)
    training = layer.training or mean is None and var is None
    return functional.batch_norm(input, mean, var, layer.weight, layer.bias, training,
                                 momentum if count is None else 1.0 / float(count), layer.eps)


class BatchNorm2d(nn.Module):
    has_backward: bool = True
    can_torch_compile: bool = True

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        return _batch_norm(self, input)


BatchNorm1d = BatchNorm3d = BatchNorm2d  # each checks the input by the class that it serves


class SyncBatchNorm(nn.Module):
    has_backward: bool = True
    can_torch_compile: bool = True

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        if not self.training or distributed.spanned(self.process_group, input) is None:
            return _batch_norm(self, input)
        momentum, count = _counted(self)
        mean, var = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        return distributed.batch_norm(input, mean, var, self.weight, self.bias, momentum, self.eps,
                                      batches_tracked=count, process_group=self.process_group)


class InstanceNorm2d(nn.Module):
    has_backward: bool = True
    can_torch_compile: bool = True

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        is_one = input.dim() == self._get_no_batch_dim()
        modules._InstanceNorm._check_channels(self, input, 0 if is_one else 1)
        momentum = 0.0 if self.momentum is None or modules._recomputes() else self.momentum
        output = functional.instance_norm(input.unsqueeze(0) if is_one else input, self.running_mean, self.running_var,
                                          self.weight, self.bias, self.training or not self.track_running_stats,
                                          momentum, self.eps)
        return output.squeeze(0) if is_one else output


InstanceNorm1d = InstanceNorm3d = InstanceNorm2d


class LayerNorm(nn.Module):
    """Over the last axis; a layer norm over several is PyTorch's."""
    has_backward: bool = True
    can_torch_compile: bool = True

    def forward(self, input: Tensor) -> Tensor:
        if len(self.normalized_shape) > 1:
            return nn.functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return functional.channel_norm(input, self.weight, self.bias, eps=self.eps, dim=-1)


class RMSNorm(nn.Module):
    """Likewise; one whose eps is PyTorch's default is PyTorch's, too."""
    has_backward: bool = True
    can_torch_compile: bool = True

    def forward(self, input: Tensor) -> Tensor:
        if len(self.normalized_shape) > 1 or self.eps is None:
            return nn.functional.rms_norm(input, self.normalized_shape, self.weight, self.eps)
        return functional.channel_norm(input, self.weight, statistics="mean_square", eps=self.eps, dim=-1)
