"""Following labels: newer versions are attached in the background and adopted when you say so."""
from types import TracebackType
from typing import Any, List, Optional, Tuple, Type

from . import _native
from ._errors import Error
from ._handle import Handle


class Live:
    """A model that follows its label; made by Client.follow(). adopt() is for one thread at a time."""

    def __init__(self, native: _native.Live) -> None:
        self._native = native
        first = native.adopt(None)
        assert first is not None  # None says: the version that you know.
        self._current = Handle(first)

    def adopt(self) -> Handle:
        """The newest version that is attached: the same object until there is a newer one. Never
        waits. Views of older versions stay good as long as you keep them.

        Raises FailedPrecondition when closed.
        """
        newer = self._native.adopt(self._current._native)
        if newer is not None:
            self._current = Handle(newer)
        return self._current

    def remap(self) -> Handle:
        """Of follow(..., same_addresses=True): the newest version that is attached takes the place of
        the old one on the GPU, at the same device addresses, so that a captured CUDA graph goes on
        with new weights. Call it when no kernel that reads them is under way or can start. adopt()
        changes nothing there. Host addresses are new; an older handle has no device memory any more.

        Raises FailedPrecondition (another layout, which the text names: the old version stays; not
        such a live model; closed), ResourceExhausted and DataLoss (the driver does not map it).
        """
        newer = self._native.remap(self._current._native)
        if newer is not None:
            self._current = Handle(newer)
        return self._current

    @property
    def current(self) -> Handle:
        """The version adopted last; adopts nothing."""
        return self._current

    @property
    def error(self) -> Optional[Error]:
        """Why the last attempt to attach a newer version failed (it is tried again), or None."""
        return self._native.error

    def close(self) -> None:
        """Follows no more. `current` stays."""
        self._native.close()

    def __enter__(self) -> "Live":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException],
                 traceback: Optional[TracebackType]) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Tuple[Any, ...]:
        raise TypeError("cannot pickle a modelhost.Live: it belongs to this process (follow it there)")


class LiveSet:
    """Models that change together; made by Client.follow_set()."""

    def __init__(self, native: _native.LiveSet) -> None:
        self._native = native
        self._current: Tuple[Handle, ...] = tuple(
            Handle(each) for each in native.adopt([]) if each is not None)

    def adopt(self) -> Tuple[Handle, ...]:
        """The newest set that is attached, in the order of the references. Members that did not
        change are the same objects, and so is the tuple when none did."""
        known: List[_native.Handle] = [handle._native for handle in self._current]
        newer = self._native.adopt(known)
        if any(each is not None for each in newer):
            self._current = tuple(old if each is None else Handle(each)
                                  for old, each in zip(self._current, newer))
        return self._current

    @property
    def current(self) -> Tuple[Handle, ...]:
        """The set adopted last; adopts nothing."""
        return self._current

    @property
    def error(self) -> Optional[Error]:
        """Why the last attempt to attach a newer set failed (it is tried again), or None."""
        return self._native.error

    def close(self) -> None:
        """Follows no more. `current` stays."""
        self._native.close()

    def __enter__(self) -> "LiveSet":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException],
                 traceback: Optional[TracebackType]) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Tuple[Any, ...]:
        raise TypeError("cannot pickle a modelhost.LiveSet: it belongs to this process (follow there)")
