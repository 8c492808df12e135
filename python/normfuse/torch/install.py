# SPDX-License-Identifier: MIT
"""install and uninstall: every stock group norm, batch norm and instance norm of the process runs on normfuse, without
a change to any model.

Overridden are the CPU and CUDA kernels of aten's native_group_norm, native_batch_norm, cudnn_batch_norm, their like and
their backwards. They lie below autograd and autocast: PyTorch's own autograd formulas drive them, and arguments and
results have the shapes and dtypes of stock. (torch.nn.functional.instance_norm ends in these batch norms.) Saved
statistics are f32, or f64 for f64 input, where stock's are of 16 bits too.

The kernels are the C library's (src/bindings/torch.c), registered through libtorch's stable C interface; those in this
file take their place where that is missing.

Nothing is fused this way, since stock's operators have no place for an activation: convert does that.
"""
from __future__ import annotations

import contextlib
import threading
import warnings
from types import TracebackType
from typing import Any, Iterator, Optional

import torch
from torch import Tensor

from . import _native
from ._operators import WANT_BIAS, WANT_WEIGHT, WANT_X, _library as _operators, binding, ops, statistics_dtype

__all__ = ["install", "uninstall"]

_Three = tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]

# ---- kernels --------------------------------------------------------------------------------------------------------


def _image(x: Tensor, n: int, c: int, positions: int) -> Tensor:
    """native_group_norm may be called with any shape of n * c * positions values, row-major."""
    return x if x.dim() >= 2 and x.shape[0] == n and x.shape[1] == c else x.contiguous().view(n, c, positions)


def _asked(output_mask: list[bool], weight: Optional[Tensor], c: int, input: Tensor) -> tuple[int, Optional[Tensor]]:
    """`wanted`, and what the gradient of bias is to look like: aten's backwards are not told bias."""
    wanted = (WANT_X * output_mask[0] + WANT_WEIGHT * (output_mask[1] and weight is not None)
              + WANT_BIAS * output_mask[2])
    return wanted, weight if weight is not None or not output_mask[2] else input.new_zeros(c)


def _picked(gradients: tuple[Tensor, ...], wanted: int) -> _Three:
    return tuple(gradients[i] if wanted & bit else None  # type: ignore[return-value]
                 for i, bit in enumerate((WANT_X, WANT_WEIGHT, WANT_BIAS)))


def _native_group_norm(input: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], n: int, c: int, positions: int,
                       groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    y, _, mean, rstd = ops.group_norm.default(_image(input, n, c, positions), weight, bias, None, None, None, None,
                                              None, None, groups, eps, 0, 0.0, False)
    return y.view_as(input) if y.shape != input.shape else y, mean.to(statistics_dtype(input)), rstd


def _native_group_norm_backward(grad_out: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, weight: Optional[Tensor],
                                n: int, c: int, positions: int, groups: int, output_mask: list[bool]) -> _Three:
    wanted, bias_like = _asked(output_mask, weight, c, input)
    gradients = ops.group_norm_backward.default(
        _image(grad_out, n, c, positions), None, _image(input, n, c, positions), mean, rstd, weight, bias_like, None,
        None, None, None, None, groups, 1.0, 0, 0.0, wanted)
    dx, dweight, dbias = _picked(gradients, wanted)
    return None if dx is None else dx.view(input.shape) if dx.shape != input.shape else dx, dweight, dbias


def _given(running: Optional[Tensor]) -> Optional[Tensor]:
    """aten says "none" by an empty tensor, too."""
    return None if running is None or running.numel() == 0 else running


def _native_batch_norm(input: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], running_mean: Optional[Tensor],
                       running_var: Optional[Tensor], training: bool, momentum: float,
                       eps: float) -> tuple[Tensor, Tensor, Tensor]:
    running_mean, running_var = _given(running_mean), _given(running_var)
    statistics = statistics_dtype(input)
    if not training:
        y = ops.batch_norm_inference.default(input, weight, bias, running_mean, running_var, None, None, None, None,
                                             eps, 0, 0.0)
        return y, input.new_empty(0, dtype=statistics), input.new_empty(0, dtype=statistics)
    if eps <= 0.0 or input.numel() == input.shape[1]:
        return _unusual_batch_norm(input, weight, bias, running_mean, running_var, momentum, eps)
    y, _, mean, rstd = ops.batch_norm.default(input, weight, bias, running_mean, running_var, None, None, None,
                                              None, momentum, eps, 0, 0.0, False)
    return y, mean.to(statistics), rstd


def _update_running(running_mean: Tensor, running_var: Tensor, mean: Tensor, one: Tensor, momentum: float) -> None:
    """one: [1, C, values]"""
    values = one.double() if one.dtype == torch.float64 else one.float()
    # torch's own var warns of one value.
    variance = values.var(2).flatten() if values.shape[2] > 1 else torch.full_like(mean, torch.nan)
    for running, new in ((running_mean, mean), (running_var, variance)):
        running.copy_((1.0 - momentum) * running + momentum * new)


def _update_running_of_one_value(running_mean: Tensor, running_var: Tensor, x: Tensor, momentum: float) -> None:
    _update_running(running_mean, running_var, x.flatten().to(statistics_dtype(x)), x.reshape(1, -1, 1), momentum)


# Calls that the C library's kernels leave to Python.
_operators.define("update_running_of_one_value(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor x, "
                  "float momentum) -> ()")
_operators.impl("update_running_of_one_value", _update_running_of_one_value, "CompositeExplicitAutograd")


def _unusual_batch_norm(input: Tensor, weight: Optional[Tensor], bias: Optional[Tensor],
                        running_mean: Optional[Tensor], running_var: Optional[Tensor], momentum: float,
                        eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The calls that normfuse's batch norm refuses and stock's kernels do not, as instance norm does: eps <= 0, and one
    value a channel. As group norm of one sample, with a group for each channel."""
    swapped = input.transpose(0, 1)
    c = input.shape[1]
    one = swapped.reshape(1, c, -1)
    y, _, mean, rstd = ops.group_norm.default(one, weight, bias, *(None,) * 6, c, eps, 0, 0.0, False)
    if running_mean is not None and running_var is not None:
        _update_running(running_mean, running_var, mean.view(c), one, momentum)
    result = torch.empty_like(input)
    result.copy_(y.view(swapped.shape).transpose(0, 1))
    return result, mean.view(c).to(statistics_dtype(input)), rstd.view(c)


def _native_batch_norm_backward(grad_out: Tensor, input: Tensor, weight: Optional[Tensor],
                                running_mean: Optional[Tensor], running_var: Optional[Tensor],
                                save_mean: Optional[Tensor], save_invstd: Optional[Tensor], train: bool, eps: float,
                                output_mask: list[bool]) -> _Three:
    wanted, bias_like = _asked(output_mask, weight, input.shape[1], input)
    if not train:
        return _picked(ops.batch_norm_evaluate_backward.default(
            grad_out, None, input, running_mean, running_var, weight, bias_like, None, None, None, eps, 0, 0.0,
            wanted), wanted)
    if input.numel() == input.shape[1]:
        c = input.shape[1]
        gradients = ops.group_norm_backward.default(
            grad_out.reshape(1, c, 1), None, input.reshape(1, c, 1), save_mean, save_invstd, weight, bias_like, None,
            None, None, None, None, c, 1.0, 0, 0.0, wanted)
        return _picked((gradients[0].view(input.shape) if output_mask[0] else None, *gradients[1:3]), wanted)
    assert save_mean is not None and save_invstd is not None
    # rstd is given, so eps plays no part; the library asks that it be above 0 all the same.
    return _picked(ops.batch_norm_backward.default(
        grad_out, None, input, save_mean, save_invstd, weight, bias_like, None, None, None, 1.0, 0, 0.0,
        wanted), wanted)


def _cudnn_batch_norm(input: Tensor, weight: Tensor, bias: Optional[Tensor], running_mean: Optional[Tensor],
                      running_var: Optional[Tensor], training: bool, exponential_average_factor: float,
                      epsilon: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (*_native_batch_norm(input, weight, bias, running_mean, running_var, training, exponential_average_factor,
                                epsilon), input.new_empty(0, dtype=torch.uint8))


def _cudnn_batch_norm_backward(input: Tensor, grad_output: Tensor, weight: Tensor, running_mean: Optional[Tensor],
                               running_var: Optional[Tensor], save_mean: Optional[Tensor], save_var: Optional[Tensor],
                               epsilon: float, reserve: Tensor) -> _Three:
    return _native_batch_norm_backward(grad_output, input, weight, running_mean, running_var, save_mean, save_var, True,
                                       epsilon, [True, True, True])


def _native_batch_norm_legit_no_stats(input: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], training: bool,
                                      momentum: float, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return _native_batch_norm(input, weight, bias, None, None, training, momentum, eps)


def _batch_norm_with_update(input: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], running_mean: Tensor,
                            running_var: Tensor, momentum: float, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (*_native_batch_norm(input, weight, bias, running_mean, running_var, True, momentum, eps),
            input.new_empty(0, dtype=torch.uint8))


def _batch_norm_no_update(input: Tensor, weight: Optional[Tensor], bias: Optional[Tensor],
                          running_mean: Optional[Tensor], running_var: Optional[Tensor], momentum: float,
                          eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (*_native_batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps),
            input.new_empty(0, dtype=torch.uint8))


def _batch_norm_backward(grad_out: Tensor, input: Tensor, weight: Optional[Tensor], running_mean: Optional[Tensor],
                         running_var: Optional[Tensor], save_mean: Optional[Tensor], save_var: Optional[Tensor],
                         update: bool, eps: float, output_mask: list[bool], reserve: Tensor) -> _Three:
    return _native_batch_norm_backward(grad_out, input, weight, running_mean, running_var, save_mean, save_var, update,
                                       eps, output_mask)


_KERNELS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "native_group_norm": (_native_group_norm, ("CPU", "CUDA")),
    "native_group_norm_backward": (_native_group_norm_backward, ("CPU", "CUDA")),
    "native_batch_norm": (_native_batch_norm, ("CPU", "CUDA")),
    "native_batch_norm_backward": (_native_batch_norm_backward, ("CPU", "CUDA")),
    "_native_batch_norm_legit": (_native_batch_norm, ("CPU", "CUDA")),
    "_native_batch_norm_legit.no_stats": (_native_batch_norm_legit_no_stats, ("CPU", "CUDA")),
    "_batch_norm_with_update": (_batch_norm_with_update, ("CPU", "CUDA")),
    "_batch_norm_no_update": (_batch_norm_no_update, ("CPU", "CUDA")),
    "batch_norm_backward": (_batch_norm_backward, ("CPU", "CUDA")),
    "cudnn_batch_norm": (_cudnn_batch_norm, ("CUDA",)),
    "cudnn_batch_norm_backward": (_cudnn_batch_norm_backward, ("CUDA",)),
}

# ---- registration ---------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_depth = 0
_has_warned = False


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without torch's warning that a kernel was overridden, which is what install is for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        yield


class _PythonKernels:
    """Registers _KERNELS."""

    def __init__(self) -> None:
        self._library: Optional[torch.library.Library] = None

    def install(self) -> None:
        library = torch.library.Library("aten", "IMPL")
        with _silent():
            for name, (kernel, keys) in _KERNELS.items():
                for key in keys:
                    library.impl(name, kernel, key)
        self._library = library

    def uninstall(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None


class _CKernels:
    def install(self) -> None:
        global _has_warned
        if not _has_warned:
            # An override from C: torch's warning goes past Python's warnings; it is given once in a process, so
            # one from Python first takes it.
            library = torch.library.Library("aten", "IMPL")
            with _silent():
                library.impl("native_group_norm", _native_group_norm, "CPU")
            library._destroy()
            _has_warned = True
        _native.install_shim()

    def uninstall(self) -> None:
        _native.uninstall_shim()


_kernels = _CKernels() if binding()[0] == "shim" else _PythonKernels()


class _Installed:
    """The result of install(): as a context manager it takes back, at its end, the install() that it came from."""

    def __repr__(self) -> str:
        return ("<normfuse takes torch's group, batch and instance norms until normfuse.torch.uninstall()>" if _depth
                else "<normfuse.torch.install, ended>")

    def __enter__(self) -> "_Installed":
        return self

    def __exit__(self, kind: Optional[type], value: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        _leave(all_of_them=False)


def install() -> _Installed:
    """Sends every stock group norm, batch norm and instance norm of this process, on the CPU and on CUDA, to normfuse,
    from now until uninstall(), or inside `with install():`. Applies to all threads. Installing once more is counted:
    only the outermost `with` ends it.

    Not reached: code that torch.compile's inductor made, which has norms of its own; autocast, which makes f32 of the
    input before the kernel sees it; torch.nn.SyncBatchNorm over several processes.
    """
    global _depth
    with _lock:
        if _depth == 0:
            _kernels.install()
        _depth += 1
    return _Installed()


def uninstall() -> None:
    """Gives aten its own kernels back, however often install() was called. Does nothing where nothing is installed."""
    _leave(all_of_them=True)


def _leave(all_of_them: bool) -> None:
    global _depth
    with _lock:
        if _depth == 0:
            return
        _depth = 0 if all_of_them else _depth - 1
        if _depth == 0:
            _kernels.uninstall()
