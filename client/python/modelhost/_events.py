"""The event descriptor of a client, for asyncio."""
import os
import select
import threading
import weakref
from typing import TYPE_CHECKING, Dict, List, Optional, Protocol

from ._errors import FailedPrecondition, ResourceExhausted

if TYPE_CHECKING:
    import asyncio

    _Future = asyncio.Future[None]


class EventSource(Protocol):
    @property
    def closed(self) -> bool: ...

    def event_fd(self) -> int: ...

    def clear_events(self) -> None: ...


class _Loop:
    """The tasks of one event loop that wait. Its descriptor is a copy of its own: the loop may have a
    reader of the program's for the client's."""

    def __init__(self, fd: int) -> None:
        try:
            self.fd = os.dup(fd)
        except OSError as error:
            raise ResourceExhausted(f"changed: copy the event descriptor: {error} "
                                    "(raise RLIMIT_NOFILE)") from None
        self.futures: "List[_Future]" = []


class Waiters:
    """Tasks of any event loops that wait for one client: an event, or its end, wakes all of them."""

    def __init__(self, source: EventSource) -> None:
        self._source = source
        # Held for short work, never while waiting. A signal handler may close the client within it.
        self._lock = threading.RLock()
        self._loops: "Dict[asyncio.AbstractEventLoop, _Loop]" = {}
        # How often there was an event, and the last that each task knows of. What came while a task
        # did not wait has been taken from the descriptor by others. A task that is new, as each
        # asyncio.wait_for makes one, knows what its loop does: else it would never wait again.
        self._count = 0
        self._known: "weakref.WeakKeyDictionary[object, int]" = weakref.WeakKeyDictionary()

    async def wait(self, timeout: Optional[float]) -> bool:
        import asyncio
        loop = asyncio.get_running_loop()
        self._drop_dead_loops()
        fd = self._source.event_fd()
        future: "_Future" = loop.create_future()
        waiting = self._loops.get(loop)  # Only this thread changes it.
        if waiting is None:
            waiting = _Loop(fd)
            try:
                loop.add_reader(waiting.fd, self._wake)
            except BaseException:
                os.close(waiting.fd)
                raise
            with self._lock:
                self._loops[loop] = waiting
        waiting.futures.append(future)
        task = asyncio.current_task()
        try:
            with self._lock:
                known = self._known.get(loop, self._count)
                missed = (known if task is None else self._known.get(task, known)) != self._count
            if self._source.closed:  # Since event_fd().
                self._finish(loop)
            elif missed:
                future.set_result(None)
            await asyncio.wait((future,), timeout=timeout)
            if not future.done():
                return False
            future.result()
            return True
        finally:
            with self._lock:
                self._known[loop] = self._count
                if task is not None:
                    self._known[task] = self._count
            waiting.futures.remove(future)
            if not waiting.futures and self._loops.get(loop) is waiting:
                self._forget(loop, waiting)

    def clear(self) -> None:
        """From any thread. Who clears an event takes it from the loops: they are told."""
        if self._source.closed:
            self._source.clear_events()
            return
        there = select.poll()
        there.register(self._source.event_fd(), select.POLLIN)
        if there.poll(0):
            self._wake()

    def wake_all(self) -> None:
        """From any thread."""
        with self._lock:
            loops = list(self._loops)
        for loop in loops:
            try:
                loop.call_soon_threadsafe(self._finish, loop)
            except RuntimeError:
                pass  # It has been closed.

    def _wake(self) -> None:
        self._source.clear_events()
        with self._lock:
            self._count += 1
        self.wake_all()  # The other loops may not see the descriptor in time.

    def _finish(self, loop: "asyncio.AbstractEventLoop") -> None:
        waiting = self._loops.get(loop)
        for future in () if waiting is None else tuple(waiting.futures):
            if future.done():
                continue
            if self._source.closed:
                future.set_exception(FailedPrecondition(
                    "changed: the client was closed (modelhost.connect() makes a new one)"))
            else:
                future.set_result(None)

    def _forget(self, loop: "asyncio.AbstractEventLoop", waiting: _Loop) -> None:
        with self._lock:
            if self._loops.pop(loop, None) is None:
                return
        if not loop.is_closed():
            loop.remove_reader(waiting.fd)
        os.close(waiting.fd)

    def _drop_dead_loops(self) -> None:
        """Of loops that were closed while tasks waited: those tasks never end."""
        with self._lock:
            dead = [(loop, waiting) for loop, waiting in self._loops.items() if loop.is_closed()]
        for loop, waiting in dead:
            self._forget(loop, waiting)
