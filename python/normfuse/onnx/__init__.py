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
import secrets
import stat
import sys
from typing import TYPE_CHECKING, Any, List, Optional, Tuple

from .. import _library
from .._words import require

if TYPE_CHECKING:
    from ._rewrite import Change

__all__ = ["library_path", "rewrite", "rewrite_file"]


def library_path() -> str:
    """The path of libnormfuse_onnxruntime.so, for SessionOptions.register_custom_ops_library: beside libnormfuse.so.
    ImportError where it is not there, or where an older ONNX Runtime was imported than it works with."""
    if "onnxruntime" in sys.modules:
        require("onnxruntime", "ONNX Runtime", (1, 18), "normfuse.onnx", "normfuse[onnx]")
    path = pathlib.Path(_library.find()).with_name("libnormfuse_onnxruntime.so")
    if not path.is_file():
        raise ImportError(f"normfuse: {path} is not a file; install the wheel, or run `make build` in a source tree")
    return str(path)


def rewrite(model: bytes, folder: Optional[str] = None) -> Tuple[bytes, List["Change"]]:
    """The serialized model with operators of the domain "normfuse" in the place of its normalizations, and what became
    of each of them. Bytes of what is not replaced stay as they are.

    folder      where the model's external data is, if it has such data

    ValueError: `model` is not a serialized ONNX model of one graph, or the graph is malformed; the text names the
    node."""
    require("onnx", "onnx", (1, 17), "normfuse.onnx.rewrite", "normfuse[onnx]")
    from . import _rewrite
    return _rewrite.rewrite(model, folder)


def rewrite_file(source: Any, output: Any) -> List["Change"]:
    """`rewrite` of a file into another one, which may be the same: whatever fails, `output` stays as it was. It keeps
    its permissions, and links to it stay links. External data is not copied, so a model that has some must stay in its
    folder: ValueError otherwise."""
    source, output = pathlib.Path(source), pathlib.Path(output)
    made, changes = rewrite(source.read_bytes(), str(source.parent))
    if source.parent.resolve() != output.parent.resolve():
        from ._rewrite import external_data
        files = external_data(made)
        if files:
            raise ValueError(f"{source} has external data ({', '.join(files)}), found relative to the model's folder; "
                             f"write the output into {source.parent}")
    _write(output.resolve(), made)
    return changes


def _write(path: pathlib.Path, data: bytes) -> None:
    """Into a new file beside it, which then takes its name."""
    mode = path.stat().st_mode if path.exists() else None
    if mode is not None and not stat.S_ISREG(mode):
        raise ValueError(f"{path} is not a file")
    temporary = path.with_name(f".normfuse-{secrets.token_hex(8)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode) & 0o777)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
