"""Connecting, and what a client can be asked for."""
import math
import os
from types import TracebackType
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple, Type, Union

from . import _native
from ._errors import InvalidArgument
from ._events import Waiters
from ._handle import Handle
from ._live import Live, LiveSet

_LONGEST_MS = 365 * 24 * 3600 * 1000


class ClientState(NamedTuple):
    """What Client.state() answers."""

    socket: str
    """The path in use."""
    epoch: int
    """+1 at every start of the daemon."""
    connected: bool
    """False while the daemon is away."""
    leases: int
    """Held by this client, also those to be declared again."""
    reconnects: int


class Resolved(NamedTuple):
    """What Client.resolve() answers."""

    version: int
    generation: int
    """How often the label has moved; 0 for a fixed version."""


def _milliseconds(timeout: Optional[float]) -> int:
    if timeout is None:
        return 0
    if not timeout > 0:
        raise InvalidArgument(f"timeout {timeout!r}: must be more than 0 seconds (None: the client's)")
    return min(_LONGEST_MS, max(1, math.ceil(min(timeout, 1e9) * 1000)))


def _device(device: Any) -> str:
    """For the C API: "" is the host alone."""
    name = "" if device is None else str(device)
    if name == "cpu":
        return ""
    if name.startswith("cuda:"):
        raise InvalidArgument(
            f"device {name!r}: numbers depend on CUDA_VISIBLE_DEVICES (give the UUID that "
            "`nvidia-smi -L` prints, or 'cuda' for the GPU of the current context)")
    return name


def _refs(refs: Sequence[str]) -> List[str]:
    if isinstance(refs, str):  # A sequence of strings too, of one letter each.
        raise TypeError(f"several references are wanted, not {refs!r} (give a list: [{refs!r}])")
    return list(refs)


def connect(runtime_dir: Union[str, "os.PathLike[str]", None] = None, *,
            timeout: Optional[float] = None) -> "Client":
    """Connects to the daemon of this machine.

    runtime_dir: the directory of handles.sock. None: $MODELHOST_RUNTIME_DIR, else the user's, else
        /run/modelhost.
    timeout: seconds, for every wait of this client that has none of its own, also for a daemon that
        is not there yet. None: 5.

    Raises Unavailable (no daemon; the text names the sockets tried), DeadlineExceeded,
    PermissionDenied, ResourceExhausted, InvalidArgument, Unimplemented.
    """
    folder = None if runtime_dir is None else os.fsencode(runtime_dir)
    return Client(_native.connect(folder, _milliseconds(timeout)))


class Client:
    """A session with the daemon; made by connect().

    While the daemon is away what is mapped stays, and the library connects again by itself. A client
    that is garbage ends its session with the last view of the last handle; close() ends it at once.
    """

    def __init__(self, native: _native.Client) -> None:
        self._native = native
        self._waiters = Waiters(native)

    def acquire(self, ref: str, *, wait: bool = False, timeout: Optional[float] = None,
                device: Any = None) -> Handle:
        """Takes a lease on a version and maps it. Nothing is read or copied.

        ref: "planner" (= "planner:stable"), "planner:canary" or "planner@7".
        wait: until the version is READY or the timeout. Otherwise fails at once if it is not.
        timeout: seconds for the whole call. None: the client's.
        device: None for the host; "cuda" or a GPU's UUID for the copy on that GPU too; "auto" for
            that if there is one.

        Raises NotFound (with near names), FailedPrecondition (not READY), DeadlineExceeded,
        PermissionDenied, ResourceExhausted, DataLoss, Unimplemented, Unavailable. In the main thread
        also what a signal handler raises meanwhile (KeyboardInterrupt).
        """
        return Handle(self._native.acquire(ref, wait, _milliseconds(timeout), _device(device)))

    def acquire_set(self, refs: Sequence[str], *, wait: bool = False,
                    timeout: Optional[float] = None, device: Any = None) -> List[Handle]:
        """As acquire, for 1 to 32 references that are resolved from one snapshot of the labels:
        all of them, or an error."""
        return [Handle(native) for native in self._native.acquire_set(
            _refs(refs), wait, _milliseconds(timeout), _device(device))]

    def follow(self, ref: str, *, wait: bool = False, timeout: Optional[float] = None,
               device: Any = None, same_addresses: bool = False) -> Live:
        """Acquires `ref` and goes on following its label: newer versions are attached in the
        background, and Live.adopt() hands them over when you say so.

        same_addresses: on a GPU, every version is seen at the same device addresses, which
            Live.remap() alone changes. For CUDA graphs.

        Errors as acquire; Unimplemented where the GPU's mode cannot keep addresses.
        """
        return Live(self._native.follow(ref, wait, _milliseconds(timeout), _device(device),
                                        same_addresses))

    def follow_set(self, refs: Sequence[str], *, wait: bool = False,
                   timeout: Optional[float] = None, device: Any = None) -> LiveSet:
        """Several models that must change together: acquired from one snapshot, adopted at once."""
        return LiveSet(self._native.follow_set(_refs(refs), wait, _milliseconds(timeout),
                                               _device(device)))

    def resolve(self, ref: str) -> Resolved:
        """Which version a reference names now, from the shared page: no lease, no round trip.

        Raises NotFound. A fixed version is not checked.
        """
        return Resolved(*self._native.resolve(ref))

    def state(self) -> ClientState:
        """Socket, epoch, whether it is connected, leases, reconnects."""
        return ClientState(**self._native.state())

    def fileno(self) -> int:
        """A descriptor that is readable when something changed: a label moved, a version drains, a
        live model can adopt, the daemon came or went. For select, poll and event loops; do not close
        it. Call clear_events(), then look. The first call starts to listen.

        Raises ResourceExhausted, FailedPrecondition when closed.
        """
        return self._native.event_fd()

    def clear_events(self) -> None:
        """Makes fileno() unreadable until the next change."""
        self._waiters.clear()

    async def changed(self, timeout: Optional[float] = None) -> bool:
        """Waits, in asyncio, until something changed, and clears it; see fileno(). True, also where
        nothing has changed after all; False after `timeout` seconds. Tasks of several event loops may
        wait: each is told of what happened since its last call, the first time of what nobody has
        cleared yet. (asyncio.wait_for makes a new task of every call, which is told of what happened
        since the last one of any task of its loop; so use `timeout` where several tasks wait.)

        Raises FailedPrecondition when the client is closed, also meanwhile; as fileno().
        """
        return await self._waiters.wait(timeout)

    def close(self) -> None:
        """Ends the session and all its leases. Views stay good; what needs the daemon raises
        FailedPrecondition from now on, and so do calls of other threads and tasks that wait."""
        self._native.close()
        self._waiters.wake_all()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException],
                 traceback: Optional[TracebackType]) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Tuple[Any, ...]:
        raise TypeError("cannot pickle a modelhost.Client: its session belongs to this process "
                        "(connect there)")
