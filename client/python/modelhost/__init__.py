"""Read-only views of model weights that modelhostd holds for this machine.

    import modelhost

    with modelhost.connect() as client:
        model = client.acquire("planner", wait=True, timeout=30)   # "planner:canary", "planner@7"
        weight = model["model.norm.weight"].numpy()                # nothing is read, parsed or copied
        tokenizer = bytes(model.file("tokenizer.json"))
        state_dict = model.torch()                                 # torch tensors on the same memory

A view (tensor, array, torch tensor, memoryview, file) keeps its version mapped, unchanged and at one
address, in whatever order things are freed; also after a swap and after the daemon's death.

Units: times in seconds, sizes in bytes, shapes and strides in elements, outermost first.
Threads: all objects may be shared by threads; calls that wait release the GIL.
Errors: `Error` and its subclasses, one for each status of the C API, with the library's own text.
fork: a child may go on reading; calls that need the daemon raise FailedPrecondition there until the
child connects for itself.
"""
from pkgutil import extend_path as _extend_path

try:
    from ._native import File, Tensor
except ModuleNotFoundError as _error:
    import pathlib as _pathlib
    import sys as _sys
    _built = sorted(path.name for path in _pathlib.Path(__file__).parent.glob("_native.*.so"))
    if not _built:
        raise ImportError(f"modelhost._native: {_pathlib.Path(__file__).parent} has none (this is the source "
                          "tree? the package that was built is in build/release/python)") from _error
    raise ImportError(f"modelhost._native: there is none for this Python, {_sys.executable} "
                      f"({_sys.implementation.cache_tag}), but {', '.join(_built)} (use "
                      "the Python that it was built for, or build for this one with "
                      "-DMODELHOST_PYTHON_EXECUTABLE)") from _error

from ._client import Client, connect
from ._errors import (Aborted, AlreadyExists, Cancelled, DataLoss, DeadlineExceeded, Error,
                      FailedPrecondition, Internal, InvalidArgument, NotFound, OutOfRange,
                      PermissionDenied, ResourceExhausted, Unauthenticated, Unavailable,
                      Unimplemented, Unknown)
from ._handle import Handle
from ._live import Live, LiveSet

__all__ = [
    "Aborted", "AlreadyExists", "Cancelled", "Client", "DataLoss", "DeadlineExceeded", "Error",
    "FailedPrecondition", "File", "Handle", "Internal", "InvalidArgument", "Live", "LiveSet",
    "NotFound", "OutOfRange", "PermissionDenied", "ResourceExhausted", "Tensor", "Unauthenticated",
    "Unavailable", "Unimplemented", "Unknown", "connect",
]

# Messages that protoc generates from proto/ are modules `modelhost.v1.*`: a folder that has them may
# be on sys.path beside this package, for programs that use both.
__path__ = _extend_path(__path__, __name__)

# As users know them, not where they are defined.
for _name in __all__:
    globals()[_name].__module__ = __name__
del _name
