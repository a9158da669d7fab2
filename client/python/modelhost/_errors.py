"""One exception class for each status of the C API (google.rpc.Code), with the library's own text.

Where Python has a class for the same thing it is a base too: `except KeyError` catches NotFound,
`except TimeoutError` DeadlineExceeded, and so on. Those that are an OSError have an errno.
"""
import errno
from typing import Dict, Type


class Error(Exception):
    """Base of all errors of this package. `status` is the name of its code, `str()` the text."""

    status = "UNKNOWN"

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class Cancelled(Error):
    status = "CANCELLED"


class Unknown(Error):
    status = "UNKNOWN"


class InvalidArgument(Error, ValueError):
    status = "INVALID_ARGUMENT"


class DeadlineExceeded(Error, TimeoutError):
    """Not READY in time; or a daemon that accepts and does not answer."""

    status = "DEADLINE_EXCEEDED"

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.errno, self.strerror = errno.ETIMEDOUT, message


class NotFound(Error, KeyError):
    """No such model, version, tensor or file. The text has near names."""

    status = "NOT_FOUND"


class AlreadyExists(Error):
    status = "ALREADY_EXISTS"


class PermissionDenied(Error, PermissionError):
    """You may not connect, or not read this model."""

    status = "PERMISSION_DENIED"

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.errno, self.strerror = errno.EACCES, message


class ResourceExhausted(Error):
    """RLIMIT_NOFILE, address space, or a limit of the daemon."""

    status = "RESOURCE_EXHAUSTED"


class FailedPrecondition(Error):
    """Not READY; a closed client or handle; a call in a forked child."""

    status = "FAILED_PRECONDITION"


class Aborted(Error):
    status = "ABORTED"


class OutOfRange(Error, IndexError):
    status = "OUT_OF_RANGE"


class Unimplemented(Error):
    """A daemon or library of another version; the text says what to update."""

    status = "UNIMPLEMENTED"


class Internal(Error):
    status = "INTERNAL"


class Unavailable(Error, ConnectionError):
    """No daemon until the deadline. The text names the sockets tried."""

    status = "UNAVAILABLE"

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.errno, self.strerror = errno.ECONNREFUSED, message


class DataLoss(Error):
    """A broken index, or pages that cannot be read."""

    status = "DATA_LOSS"


class Unauthenticated(Error):
    status = "UNAUTHENTICATED"


_BY_CODE: Dict[int, Type[Error]] = dict(enumerate(
    (Cancelled, Unknown, InvalidArgument, DeadlineExceeded, NotFound, AlreadyExists,
     PermissionDenied, ResourceExhausted, FailedPrecondition, Aborted, OutOfRange, Unimplemented,
     Internal, Unavailable, DataLoss, Unauthenticated), start=1))


def error_of(code: int, message: str) -> Error:
    """The exception for a status of the C API (called by the extension)."""
    return _BY_CODE.get(code, Unknown)(message)
