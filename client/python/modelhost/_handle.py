"""A version of a model, as a mapping from names to tensors."""
from types import TracebackType
from typing import (TYPE_CHECKING, Any, Dict, ItemsView, Iterator, Mapping, Optional, Tuple, Type,
                    TypeVar, Union, ValuesView, overload)

from . import _native
from ._native import File, Tensor

if TYPE_CHECKING:
    import torch


_T = TypeVar("_T")


class _Items(ItemsView[str, Tensor]):
    def __init__(self, handle: "Handle") -> None:
        super().__init__(handle)
        self._native = handle._native

    def __contains__(self, item: object) -> bool:
        if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[0], str):
            return False
        name, tensor = item
        return self._native.has(name) and self._native.tensor(name) == tensor

    def __iter__(self) -> Iterator[Tuple[str, Tensor]]:
        return iter(self._native.items(None))


class _Values(ValuesView[Tensor]):
    def __init__(self, handle: "Handle") -> None:
        super().__init__(handle)
        self._native = handle._native

    def __iter__(self) -> Iterator[Tensor]:
        return (tensor for _, tensor in self._native.items(None))


class Handle(Mapping[str, Tensor]):
    """A lease on one version and a read-only mapping from names to its tensors.

    A snapshot: nothing of it changes while it or a view of it lives. Tensor objects are made when
    asked for. A key is a tensor's bare name, or "component/name" where several components have that
    name; keys are sorted by name.

    close(), leaving a `with` block, or garbage collection gives up the handle's own hold; the lease
    and the mapping end with the last view.
    """

    def __init__(self, native: _native.Handle) -> None:
        self._native = native

    # --- tensors

    def __getitem__(self, name: str) -> Tensor:
        """Raises NotFound (a KeyError; with near names), InvalidArgument when several components
        have it, DataLoss."""
        return self._native.tensor(name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._native.has(name)

    @overload
    def get(self, name: str) -> Optional[Tensor]: ...

    @overload
    def get(self, name: str, default: Union[Tensor, _T]) -> Union[Tensor, _T]: ...

    def get(self, name: str, default: Any = None) -> Any:
        """The tensor of this name, or `default` where `name in handle` is false."""
        return self._native.tensor(name) if name in self else default

    def __len__(self) -> int:
        return self._native.count()

    def __iter__(self) -> Iterator[str]:
        return iter(self._native.keys(None))

    def items(self) -> ItemsView[str, Tensor]:
        return _Items(self)

    def values(self) -> ValuesView[Tensor]:
        return _Values(self)

    def torch(self, component: Optional[str] = None, *, copy: bool = False,
              strict: bool = True) -> "Dict[str, torch.Tensor]":
        """A state_dict: all tensors of a component as torch tensors on the shared memory.

        component: which; needed where the version has several.
        copy: with private, writable copies. Without, a write ends the process (SIGSEGV): torch has
            no read-only tensors.
        strict: False leaves out what torch cannot have: types that this torch lacks, and tensors that
            cannot be mapped.

        Raises InvalidArgument, NotFound, TypeError for a type that this torch does not have,
        FailedPrecondition for a tensor that cannot be mapped.
        """
        from .torch import state_dict
        return state_dict(self, component, copy=copy, strict=strict)

    # --- files, metadata, components

    def file(self, path: str) -> File:
        """One file of the version: bytes(f), memoryview(f) or f.data, and open(f) or f.path, a
        /proc/self/fd path that is good while the file object or the handle lives.

        The first call for a file asks the daemon. Raises NotFound (with near names), Unavailable,
        DeadlineExceeded, ResourceExhausted, FailedPrecondition, DataLoss.
        """
        return self._native.file(path)

    @property
    def files(self) -> Tuple[str, ...]:
        """Paths of all files of the version, sorted."""
        return tuple(self._native.files())

    @property
    def metadata(self) -> Dict[str, str]:
        """Of the model files; numbers and arrays as JSON. "component/key" where several components
        have metadata."""
        return self._native.metadata()

    @property
    def components(self) -> Dict[str, str]:
        """Weight sets of the version: {name: format}."""
        return self._native.components()

    # --- what it is

    @property
    def model(self) -> str:
        return self._native.model

    @property
    def label(self) -> str:
        """The label that it was acquired by; "" for a fixed version."""
        return self._native.label

    @property
    def version(self) -> int:
        return self._native.version

    @property
    def generation(self) -> int:
        """How often the label had moved; 0 for a fixed version."""
        return self._native.generation

    @property
    def digest(self) -> str:
        """SHA-256 of the version's content, 64 hex digits."""
        return self._native.digest

    @property
    def format(self) -> str:
        """"safetensors", "gguf", ..."""
        return self._native.format

    @property
    def gpu(self) -> str:
        """UUID of the GPU that it has device memory on; "" without."""
        return self._native.gpu

    @property
    def device_mode(self) -> str:
        """How: "vmm_fd", "host_direct", "host_registered", "cuda_ipc", or "none"."""
        return self._native.device_mode

    @property
    def device_reason(self) -> str:
        """Why it has no device memory; "" when it has."""
        return self._native.device_reason

    @property
    def superseded(self) -> bool:
        """Whether the label has moved since. One atomic load: fit for every turn of a loop."""
        return self._native.superseded

    # --- end

    @property
    def closed(self) -> bool:
        return self._native.closed

    def close(self) -> None:
        """Gives up this handle's hold. Views that were taken stay good, and keep the lease."""
        self._native.close()

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException],
                 traceback: Optional[TracebackType]) -> None:
        self.close()

    # Handles are told apart by identity: comparing weights is not what == is for.
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        if self.closed:
            return f"<modelhost.Handle {self._native.name}, closed>"
        label = f" as {self.label}" if self.label else ""
        return f"<modelhost.Handle {self._native.name}{label}, {len(self)} tensors>"

    def __reduce_ex__(self, protocol: Any) -> Tuple[Any, ...]:
        raise TypeError("cannot pickle or copy a modelhost.Handle: its lease and its memory belong to "
                        "this process (send the reference and acquire it there)")
