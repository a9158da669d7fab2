"""The event descriptor of a client, for asyncio."""
from typing import TYPE_CHECKING, List, Protocol

if TYPE_CHECKING:
    import asyncio


class EventSource(Protocol):
    def fileno(self) -> int: ...

    def clear_events(self) -> None: ...


class Waiters:
    """Tasks of one event loop that wait for the same descriptor: an event wakes all of them."""

    def __init__(self, source: EventSource) -> None:
        self._source = source
        self._futures: "List[asyncio.Future[None]]" = []

    async def wait(self) -> None:
        import asyncio
        loop = asyncio.get_running_loop()
        fd = self._source.fileno()
        future: "asyncio.Future[None]" = loop.create_future()
        if not self._futures:
            loop.add_reader(fd, self._wake)
        self._futures.append(future)
        try:
            await future
        finally:
            self._futures.remove(future)
            if not self._futures:
                loop.remove_reader(fd)

    def _wake(self) -> None:
        self._source.clear_events()
        for future in self._futures:
            if not future.done():
                future.set_result(None)
