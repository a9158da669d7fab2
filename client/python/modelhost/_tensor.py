"""The part of Tensor that needs numpy, which is imported when first asked for."""
from typing import TYPE_CHECKING, Any, Tuple

from ._native import Tensor

if TYPE_CHECKING:
    import numpy.typing

# Called by the extension.


def to_numpy(tensor: Tensor, raw: bool) -> "numpy.typing.NDArray[Any]":
    import numpy
    tensor.data_ptr  # Raises with the reason if it cannot be mapped.
    if raw:
        return _raw(tensor)
    if tensor.format is None:
        raise TypeError(
            f"tensor {tensor.name!r}: numpy has no type for {tensor.dtype} "
            f"(.numpy(raw=True) shows its bits as unsigned integers, .view_bytes() its bytes"
            f"{'; .torch() has a type for it' if tensor.itemsize else ''})")
    buffer: Any = tensor  # Its type stub cannot say that it has the buffer protocol.
    return numpy.asarray(memoryview(buffer))


def _raw(tensor: Tensor) -> "numpy.typing.NDArray[Any]":
    import numpy
    flat = numpy.frombuffer(tensor.view_bytes(), dtype=numpy.uint8)
    size = tensor.itemsize
    if size in (1, 2, 4, 8):
        strides = tuple(stride * size for stride in tensor.strides)
        return numpy.lib.stride_tricks.as_strided(
            flat[:tensor.nbytes // size * size].view(f"<u{size}"), tensor.shape, strides,
            writeable=False)
    if size:  # No such integers: their bytes are a last axis.
        return numpy.lib.stride_tricks.as_strided(
            flat, (*tensor.shape, size), (*(stride * size for stride in tensor.strides), 1), writeable=False)
    return flat.reshape(_rows(tensor))


def _rows(tensor: Tensor) -> Tuple[int, ...]:
    """Blocks lie along the last dimension: bytes of a row take its place."""
    elements, size = tensor.block
    if tensor.shape and size and tensor.shape[-1] % elements == 0:
        return (*tensor.shape[:-1], tensor.shape[-1] // elements * size)
    return (tensor.nbytes,)


def to_array(tensor: Tensor, dtype: Any, copy: Any) -> "numpy.typing.NDArray[Any]":
    import numpy
    view = to_numpy(tensor, False)
    if copy or (dtype is not None and numpy.dtype(dtype) != view.dtype):
        if copy is False:
            raise ValueError(f"tensor {tensor.name!r}: {view.dtype} is not {dtype} without a copy")
        return view.astype(view.dtype if dtype is None else dtype)
    return view


def describe(tensor: Tensor) -> str:
    return (f"<modelhost.Tensor {tensor.name!r}, {tensor.dtype} {list(tensor.shape)}, "
            f"{tensor.nbytes} bytes>")
