"""torch tensors on shared weights: nothing is read, parsed or copied.

torch has no read-only tensors, and the memory is: a write into such a tensor (in-place operations,
an optimiser, requires_grad training) ends the process with SIGSEGV. Ask for copy=True where you
write. Reading, moving to a device, and whatever makes a new tensor is fine.
"""
import contextlib
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch

from ._errors import FailedPrecondition, InvalidArgument, NotFound
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


def _cannot(handle: "Handle", component: Optional[str], name: str, dtype: str) -> Exception:
    """Why there is no torch tensor for one of `dtype`, or that cannot be mapped."""
    try:
        dtype_of(dtype)
        key = name if component is None else f"{component}/{name}"
        handle._native.tensor(key).data_ptr  # Raises.
    except (TypeError, FailedPrecondition) as error:
        text = str(error)
        return TypeError(f"tensor {name!r}: {text}") if isinstance(error, TypeError) else error
    return TypeError(f"tensor {name!r}: DLPack has no {dtype} (.view_bytes() has the bytes)")


def _made(capsule: Any, dtype: str) -> torch.Tensor:
    made = _from_dlpack(capsule)
    real = _AS_BYTES.get(dtype)
    return made if real is None else made.view(real)


def tensor(view: Tensor, copy: bool = False) -> torch.Tensor:
    """One tensor (the same as view.torch(copy=...)). Raises TypeError for a type that this torch
    does not have, FailedPrecondition for what cannot be mapped."""
    if view.dtype not in _DTYPES:
        try:
            dtype_of(view.dtype)
        except TypeError as error:
            raise TypeError(f"tensor {view.name!r}: {error}") from None
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


def _all(handle: "Handle", component: Optional[str]
         ) -> Tuple[Dict[str, torch.Tensor], Dict[str, Exception]]:
    """The tensors of a component, and why others of it are not there."""
    component = _component(handle, component)
    made: Dict[str, torch.Tensor] = {}
    refused: Dict[str, Exception] = {}
    for name, dtype, capsule in handle._native.torch_capsules(component):
        if capsule is None or dtype not in _DTYPES:
            refused[name] = _cannot(handle, component, name, dtype)
        else:
            made[name] = _from_dlpack(capsule) if dtype not in _AS_BYTES else _made(capsule, dtype)
    return made, refused


def state_dict(handle: "Handle", component: Optional[str] = None, *, copy: bool = False,
               strict: bool = True) -> Dict[str, torch.Tensor]:
    """All tensors of a component, by bare name. See Handle.torch()."""
    made, refused = _all(handle, component)
    if strict:
        for error in refused.values():
            raise error
    if copy:
        return {name: value.clone() for name, value in made.items()}
    return made


# --- load_into


class LoadResult(NamedTuple):
    """What load_into(strict=False) left out."""

    missing_keys: List[str]
    """Of the module, not in the model: left as they were. Also non-persistent buffers that are still
    on device "meta": fill them before you run the module."""
    unexpected_keys: List[str]
    """Of the model, not in the module."""


class _Slot(NamedTuple):
    """A place in a module that holds a parameter or persistent buffer."""

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


def _unfilled(module: torch.nn.Module) -> List[str]:
    """Non-persistent buffers on device meta: a model does not have them, and nothing else fills
    them."""
    names = []
    for path, owner in module.named_modules():
        for name in owner._non_persistent_buffers_set:
            buffer = owner._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                names.append(f"{path}.{name}" if path else name)
    return names


class _Assignment(NamedTuple):
    slot: _Slot
    value: torch.Tensor


def _put(slot: _Slot, value: torch.Tensor) -> None:
    if slot.is_parameter:
        setattr(slot.owner, slot.name, value)  # Recurrent modules keep lists of their own.
    else:
        slot.owner._buffers[slot.name] = value  # setattr would make a Parameter one of both kinds.


def _assign(assignments: List[_Assignment]) -> None:
    """All of them, or none and what went wrong."""
    done = 0
    try:
        for slot, value in assignments:
            done += 1  # One that fails may have been half done.
            _put(slot, value)
    except BaseException:
        for slot, _ in reversed(assignments[:done]):
            if slot.is_parameter and isinstance(slot.value, torch.nn.Parameter):
                slot.owner._parameters[slot.name] = slot.value
            with contextlib.suppress(Exception):  # As above, what failed once may fail again.
                _put(slot, slot.value)
        raise


def _values(slots: List[_Slot], found: torch.Tensor, copy: bool, share_buffers: bool,
            requires_grad: bool) -> Iterator[_Assignment]:
    """For the places of one tensor of the module."""
    parameter: Optional[torch.nn.Parameter] = None
    buffer: Optional[torch.Tensor] = None
    if any(slot.is_parameter for slot in slots):
        old = slots[0].value
        parameter = torch.nn.Parameter(found.clone() if copy else found,
                                       requires_grad=requires_grad and old.requires_grad)
        parameter.__dict__.update(old.__dict__)
    else:
        buffer = found.clone() if copy or not share_buffers else found
    for slot in slots:
        value = buffer if parameter is None else parameter
        assert value is not None
        yield _Assignment(slot, value)


def _prefix_hint(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Where one side has all the other's names, one level of modules further down."""
    if not missing or not unexpected:
        return ""

    def prefix(longer: Sequence[str], shorter: Sequence[str]) -> str:
        there = set(longer)
        for name in longer:
            before = name[:-len(shorter[0])]
            if before.endswith(".") and all(before + each in there for each in shorter):
                return before
        return ""

    inner = prefix(missing, unexpected)
    if inner:
        return f" (the model's names are those of the submodule {inner[:-1]}: load into that)"
    outer = prefix(unexpected, missing)
    if outer:
        return (f" (the model has all of these after {outer!r}: load into a module that has this one as its "
                f"{outer[:-1]})")
    return ""


def load_into(module: torch.nn.Module, handle: "Handle", *, component: Optional[str] = None,
              strict: bool = True, copy: bool = False, share_buffers: bool = False,
              requires_grad: bool = False) -> LoadResult:
    """Makes the parameters of `module` views of the model's tensors, and gives it copies of the
    model's for its persistent buffers, which modules write to while they run (BatchNorm).

    As load_state_dict(..., assign=True): the module gets new Parameter objects (with the attributes of
    the old ones, but no subclass of Parameter), so make optimisers afterwards. Hooks that
    load_state_dict would call are not called, and extra state (get_extra_state) is not looked at.
    Either everything is replaced or, on an error, nothing.

    A module that was built on device "meta" needs no memory for its parameters. Its non-persistent
    buffers are in no model: fill them before (rotary tables, for example).

    Tied weights (one parameter in several places) stay tied: one name in the model is enough; where
    the model has several, their bytes must be equal.

    component: which weight set; needed where the version has several.
    strict: missing and unexpected names are errors; otherwise they are returned.
    copy, requires_grad: private, writable copies, as training needs; requires_grad needs copy.
    share_buffers: makes buffers views too, for large ones that the module only reads. A write ends the
        process (SIGSEGV).

    Raises InvalidArgument that lists every misfit by name: shapes, dtypes (convert the module first,
    module.to(torch.bfloat16)), types that this torch lacks, missing and unexpected names. Else as
    Handle.torch().
    """
    if not isinstance(module, torch.nn.Module) or not hasattr(handle, "components"):
        raise TypeError(f"load_into(module, handle): not a {type(module).__name__} and a {type(handle).__name__} "
                        "(a torch.nn.Module, and what acquire() or adopt() gave)")
    if requires_grad and not copy:
        raise InvalidArgument("load_into: requires_grad without copy: a training step would write into "
                              "read-only memory (copy=True)")
    found, refused = _all(handle, component)
    groups: Dict[int, List[_Slot]] = {}
    for slot in _slots(module, ""):
        groups.setdefault(id(slot.value), []).append(slot)
    wrong: List[str] = []
    missing: List[str] = []
    wanted = {slot.key for slots in groups.values() for slot in slots}
    chosen: List[Tuple[List[_Slot], str]] = []
    for slots in groups.values():
        bad, keys = _check_tied(slots, found)
        bad += [f"{slot.key}: {refused[slot.key]}" for slot in slots if slot.key in refused]
        wrong += bad
        if bad:
            continue
        if keys:
            chosen.append((slots, keys[0]))
        else:
            missing += [slot.key for slot in slots]
    unexpected = [name for name in (*found, *refused) if name not in wanted]
    unfilled = _unfilled(module)
    if strict:
        wrong += [f"{key}: not in the model" for key in missing]
        wrong += [f"{name}: not in the module" for name in unexpected]
        wrong += [f"{name}: a non-persistent buffer on device meta, which no model has (fill it before)"
                  for name in unfilled]
    if wrong:
        hint = _prefix_hint(missing, unexpected) if strict and not chosen else ""
        shown = "; ".join(wrong[:8]) + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else "")
        raise InvalidArgument(f"{handle.model}@{handle.version} does not fit "
                              f"{type(module).__name__}: {shown}{hint}")
    # All that can fail for want of memory comes before the first change.
    assignments = [each for slots, key in chosen
                   for each in _values(slots, found[key], copy, share_buffers, requires_grad)]
    _assign(assignments)
    return LoadResult(missing + unfilled, unexpected)
