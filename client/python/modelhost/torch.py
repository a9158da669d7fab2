"""torch tensors on shared weights: nothing is read, parsed or copied.

torch has no read-only tensors, and the memory is: a write into such a tensor (in-place operations,
an optimiser, requires_grad training) ends the process with SIGSEGV. Ask for copy=True where you
write. Reading, moving to a device, and whatever makes a new tensor is fine.
"""
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch

from ._errors import InvalidArgument, NotFound
from ._native import Tensor

if TYPE_CHECKING:
    from ._handle import Handle

__all__ = ["LoadResult", "dtype_of", "load_into", "state_dict", "tensor"]

_from_dlpack = torch._C._from_dlpack

_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "C64": "complex64", "C128": "complex128",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
# Those that this torch has.
_DTYPES: Dict[str, torch.dtype] = {
    name: getattr(torch, attribute) for name, attribute in _NAMES.items()
    if isinstance(getattr(torch, attribute, None), torch.dtype)}
# What comes as bytes, because DLPack consumers of before 2025 have no such type.
_AS_BYTES = {name: dtype for name, dtype in _DTYPES.items() if name == "BOOL" or name[:2] == "F8"}


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of "BF16" and so on. Raises TypeError when this torch has none."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise TypeError(
            f"torch {torch.__version__} has no dtype for {name} (.view_bytes() has the bytes, "
            ".numpy(raw=True) the bits)") from None


def _refuse(name: str, dtype: str) -> None:
    try:
        dtype_of(dtype)
    except TypeError as error:
        raise TypeError(f"tensor {name!r}: {error}") from None


def _made(capsule: Any, dtype: str) -> torch.Tensor:
    made = _from_dlpack(capsule)
    real = _AS_BYTES.get(dtype)
    return made if real is None else made.view(real)


def tensor(view: Tensor, copy: bool = False) -> torch.Tensor:
    """One tensor (the same as view.torch(copy=...)). Raises TypeError for a type that this torch
    does not have, FailedPrecondition for what cannot be mapped."""
    if view.dtype not in _DTYPES:
        _refuse(view.name, view.dtype)
    made = _made(view._torch_capsule(), view.dtype)
    return made.clone() if copy else made


def _component(handle: "Handle", component: Optional[str]) -> Optional[str]:
    names = handle.components
    if component is None:
        if len(names) > 1:
            raise InvalidArgument(f"{handle.model}@{handle.version} has several components "
                                  f"(say which: {', '.join(sorted(names))})")
        return next(iter(names), None)
    if component not in names:
        raise NotFound(f"{handle.model}@{handle.version}: component {component!r}: there are "
                       f"{', '.join(sorted(names)) or 'none'}")
    return component


def state_dict(handle: "Handle", component: Optional[str] = None, *,
               copy: bool = False) -> Dict[str, torch.Tensor]:
    """All tensors of a component, by bare name. See Handle.torch()."""
    made: Dict[str, torch.Tensor] = {}
    for name, dtype, capsule in handle._native.torch_capsules(_component(handle, component)):
        if dtype not in _DTYPES:
            _refuse(name, dtype)
        made[name] = _from_dlpack(capsule) if dtype not in _AS_BYTES else _made(capsule, dtype)
    if copy:
        return {name: value.clone() for name, value in made.items()}
    return made


# --- load_into


class LoadResult(NamedTuple):
    """What load_into(strict=False) left out."""

    missing_keys: List[str]
    """Of the module, not in the model: left as they were."""
    unexpected_keys: List[str]
    """Of the model, not in the module."""


class _Slot(NamedTuple):
    """A place in a module that holds a parameter or buffer."""

    owner: torch.nn.Module
    name: str
    key: str
    """Its name in a state_dict."""
    value: torch.Tensor
    is_parameter: bool


def _slots(module: torch.nn.Module, prefix: str) -> Iterator[_Slot]:
    """Of a module that is used in two places, both."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield _Slot(module, name, prefix + name, parameter, True)
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield _Slot(module, name, prefix + name, buffer, False)
    for name, child in module._modules.items():
        if child is not None:
            yield from _slots(child, f"{prefix}{name}.")


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride():
        return True
    # As bytes: NaN is not equal to itself.
    return bool(torch.equal(a.contiguous().view(-1).view(torch.uint8),
                            b.contiguous().view(-1).view(torch.uint8)))


def _misfit(key: str, wanted: torch.Tensor, found: torch.Tensor) -> Optional[str]:
    if isinstance(wanted, torch.nn.parameter.UninitializedTensorMixin):
        return f"{key}: the module's is lazy, it has no shape yet (run it once before)"
    if wanted.shape != found.shape:
        return f"{key}: shape {list(found.shape)} in the model, {list(wanted.shape)} in the module"
    if wanted.dtype != found.dtype:
        return f"{key}: {found.dtype} in the model, {wanted.dtype} in the module"
    return None


def _check_tied(slots: List[_Slot], found: Dict[str, torch.Tensor]) -> Tuple[List[str], List[str]]:
    """What is wrong with the tensors for one parameter of the module; which of its keys exist."""
    keys = list(dict.fromkeys(slot.key for slot in slots if slot.key in found))
    wrong = [text for text in (_misfit(key, slots[0].value, found[key]) for key in keys) if text]
    if not wrong:
        wrong = [f"{key}: tied to {keys[0]} in the module, other values in the model"
                 for key in keys[1:] if not _same_bytes(found[keys[0]], found[key])]
    return wrong, keys


def load_into(module: torch.nn.Module, handle: "Handle", *, component: Optional[str] = None,
              strict: bool = True, copy: bool = False, requires_grad: bool = False) -> LoadResult:
    """Makes the parameters and persistent buffers of `module` views of the model's tensors.

    As load_state_dict(..., assign=True): the module gets new Parameter objects, so make optimisers
    afterwards; nothing is copied. A module that was built on device "meta" needs no memory at all.
    Either everything is replaced or, on an error, nothing.

    Tied weights (one parameter in several places) stay tied: one name in the model is enough; where
    the model has several, their bytes must be equal.

    component: which weight set; needed where the version has several.
    strict: missing and unexpected names are errors; otherwise they are returned.
    copy, requires_grad: private, writable copies, as training needs; requires_grad needs copy.

    Raises InvalidArgument that lists every misfit by name: shapes, dtypes (convert the module first,
    module.to(torch.bfloat16)), missing and unexpected names. Else as Handle.torch().
    """
    if requires_grad and not copy:
        raise InvalidArgument("load_into: requires_grad without copy: a training step would write into "
                              "read-only memory (copy=True)")
    found = state_dict(handle, component)
    groups: Dict[int, List[_Slot]] = {}
    for slot in _slots(module, ""):
        groups.setdefault(id(slot.value), []).append(slot)
    wrong: List[str] = []
    missing: List[str] = []
    wanted = {slot.key for slots in groups.values() for slot in slots}
    chosen: List[Tuple[List[_Slot], str]] = []
    for slots in groups.values():
        bad, keys = _check_tied(slots, found)
        wrong += bad
        if not keys:
            missing += [slot.key for slot in slots]
        elif not bad:
            chosen.append((slots, keys[0]))
    unexpected = [name for name in found if name not in wanted]
    if strict:
        wrong += [f"{key}: not in the model" for key in missing]
        wrong += [f"{name}: not in the module" for name in unexpected]
    if wrong:
        shown = "; ".join(wrong[:8]) + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else "")
        raise InvalidArgument(f"{handle.model}@{handle.version} does not fit "
                              f"{type(module).__name__}: {shown}")
    for slots, key in chosen:
        value = found[key].clone() if copy else found[key]
        if slots[0].is_parameter:
            value = torch.nn.Parameter(value, requires_grad=requires_grad and
                                       slots[0].value.requires_grad)
        for slot in slots:
            setattr(slot.owner, slot.name, value)
    return LoadResult(missing, unexpected)
