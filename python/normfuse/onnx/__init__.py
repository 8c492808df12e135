# SPDX-License-Identifier: MIT
"""normfuse's operators in ONNX Runtime, on the CPU and on CUDA.

    import onnxruntime, normfuse.onnx
    normfuse.onnx.rewrite_file("unet.onnx", "unet-normfuse.onnx")
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(normfuse.onnx.library_path())
    session = onnxruntime.InferenceSession("unet-normfuse.onnx", options)

`python -m normfuse.onnx rewrite unet.onnx -o unet-normfuse.onnx` does the same rewrite. docs/onnx.md has the operators.
"""
from __future__ import annotations

import os
import pathlib
import tempfile
from typing import TYPE_CHECKING, Any, List, Optional, Tuple

from .. import _library

if TYPE_CHECKING:
    from ._rewrite import Change

__all__ = ["library_path", "rewrite", "rewrite_file"]


def library_path() -> str:
    """Where libnormfuse_onnxruntime.so is, for SessionOptions.register_custom_ops_library: beside libnormfuse.so.
    ImportError where it is not there."""
    path = pathlib.Path(_library.find()).with_name("libnormfuse_onnxruntime.so")
    if not path.is_file():
        raise ImportError(f"normfuse: {path} is not a file; install the wheel, or run `make build` in a source tree")
    return str(path)


def rewrite(model: bytes, folder: Optional[str] = None) -> Tuple[bytes, List["Change"]]:
    """The serialized model with operators of the domain "normfuse" in the place of its normalizations, and what became of
    each of them. Bytes of what is not replaced stay as they are.

    folder      where the model's external data is, if it has such data

    ValueError: `model` is not a serialized ONNX model of one graph."""
    try:
        from . import _rewrite
    except ImportError as error:
        raise ImportError("normfuse.onnx.rewrite needs onnx: pip install normfuse[onnx]") from error
    return _rewrite.rewrite(model, folder)


def rewrite_file(source: Any, output: Any) -> List["Change"]:
    """`rewrite` of a file into another one, which may be the same. External data is not copied, so a model that has some
    must stay in its folder: ValueError otherwise."""
    source, output = pathlib.Path(source), pathlib.Path(output)
    made, changes = rewrite(source.read_bytes(), str(source.parent))
    if source.resolve().parent != output.resolve().parent:
        from ._rewrite import external_data
        files = external_data(made)
        if files:
            raise ValueError(f"{source} has external data ({', '.join(files)}), found relative to the model's folder; "
                             f"write the output into {source.parent}")
    handle, temporary = tempfile.mkstemp(dir=output.resolve().parent, prefix=output.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(made)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, output)
    except BaseException:
        os.unlink(temporary)
        raise
    return changes
