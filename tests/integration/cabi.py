"""libmodelhost.so through ctypes: the same C interface that any language uses."""
import ctypes as c

NAMES = ["OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
         "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
         "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS",
         "UNAUTHENTICATED"]


class Error(c.Structure):
    _fields_ = [("status", c.c_int), ("message", c.c_char * 512)]


class Options(c.Structure):
    _fields_ = [("size", c.c_size_t), ("runtime_dir", c.c_char_p), ("deadline_ms", c.c_uint64)]


class ClientView(c.Structure):
    _fields_ = [("size", c.c_size_t), ("socket", c.c_char_p), ("epoch", c.c_uint64),
                ("connected", c.c_uint32), ("leases", c.c_uint32), ("reconnects", c.c_uint64)]


class AcquireOptions(c.Structure):
    _fields_ = [("size", c.c_size_t), ("wait", c.c_uint32), ("want", c.c_uint32),
                ("deadline_ms", c.c_uint64)]


class TensorView(c.Structure):
    _fields_ = [("size", c.c_size_t), ("error", c.POINTER(Error)), ("name", c.c_char_p),
                ("component", c.c_char_p), ("file", c.c_char_p), ("dtype", c.c_char_p),
                ("dtype_code", c.c_uint32), ("flags", c.c_uint32), ("rank", c.c_uint32),
                ("alignment", c.c_uint32), ("shape", c.POINTER(c.c_int64)),
                ("strides", c.POINTER(c.c_int64)), ("nbytes", c.c_uint64), ("data", c.c_void_p),
                ("device_data", c.c_void_p), ("block_elements", c.c_uint32),
                ("block_bytes", c.c_uint32), ("reason", c.c_char_p)]


class FileView(c.Structure):
    _fields_ = [("size", c.c_size_t), ("error", c.POINTER(Error)), ("path", c.c_char_p),
                ("role", c.c_char_p), ("nbytes", c.c_uint64), ("digest", c.POINTER(c.c_uint8)),
                ("data", c.c_void_p), ("fd_path", c.c_char_p), ("fd", c.c_int),
                ("reserved", c.c_int)]


class Failure(Exception):
    def __init__(self, status, message):
        super().__init__(f"{NAMES[status]}: {message}")
        self.status = NAMES[status]
        self.message = message


class Library:
    def __init__(self, path):
        lib = c.CDLL(path)
        pointer = c.c_void_p
        for name, result, arguments in [
                ("mh_abi_version", c.c_uint32, []),
                ("mh_connect", pointer, [c.POINTER(Options), c.POINTER(Error)]),
                ("mh_disconnect", None, [pointer]),
                ("mh_client_state", c.c_int, [pointer, c.POINTER(ClientView)]),
                ("mh_event_fd", c.c_int, [pointer]),
                ("mh_clear_events", None, [pointer]),
                ("mh_acquire", c.c_int, [pointer, c.c_char_p, c.POINTER(AcquireOptions),
                                         c.POINTER(pointer), c.POINTER(Error)]),
                ("mh_acquire_set", c.c_int, [pointer, c.POINTER(c.c_char_p), c.c_size_t,
                                             c.POINTER(AcquireOptions), c.POINTER(pointer),
                                             c.POINTER(Error)]),
                ("mh_release", None, [pointer]),
                ("mh_handle_version", c.c_uint64, [pointer]),
                ("mh_handle_generation", c.c_uint64, [pointer]),
                ("mh_handle_digest", c.c_char_p, [pointer]),
                ("mh_handle_format", c.c_char_p, [pointer]),
                ("mh_superseded", c.c_int, [pointer]),
                ("mh_tensor", c.c_int, [pointer, c.c_char_p, c.POINTER(TensorView)]),
                ("mh_tensor_count", c.c_size_t, [pointer]),
                ("mh_tensor_at", c.c_int, [pointer, c.c_size_t, c.POINTER(TensorView)]),
                ("mh_file", c.c_int, [pointer, c.c_char_p, c.POINTER(FileView)]),
                ("mh_file_count", c.c_size_t, [pointer]),
                ("mh_copy", c.c_int, [c.c_void_p, c.c_void_p, c.c_size_t]),
                ("mh_follow", c.c_int, [pointer, c.c_char_p, c.POINTER(AcquireOptions),
                                        c.POINTER(pointer), c.POINTER(Error)]),
                ("mh_live_adopt", pointer, [pointer]),
                ("mh_live_current", pointer, [pointer]),
                ("mh_live_release", None, [pointer]),
                ("mh_follow_set", c.c_int, [pointer, c.POINTER(c.c_char_p), c.c_size_t,
                                            c.POINTER(AcquireOptions), c.POINTER(pointer),
                                            c.POINTER(Error)]),
                ("mh_live_set_adopt", c.c_int, [pointer, c.POINTER(pointer), c.c_size_t]),
                ("mh_live_set_release", None, [pointer]),
        ]:
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
        self.lib = lib

    def connect(self, runtime_dir, deadline_ms=5000):
        error = Error()
        options = Options(c.sizeof(Options), str(runtime_dir).encode(), deadline_ms)
        client = self.lib.mh_connect(c.byref(options), c.byref(error))
        if not client:
            raise Failure(error.status, error.message.decode())
        return Client(self.lib, client)


def _acquire_options(wait, deadline_ms):
    return c.byref(AcquireOptions(c.sizeof(AcquireOptions), int(wait), 0, deadline_ms))


class Client:
    def __init__(self, lib, client):
        self.lib, self.client = lib, client

    def disconnect(self):
        self.lib.mh_disconnect(self.client)
        self.client = None

    def state(self):
        view = ClientView(c.sizeof(ClientView))
        status = self.lib.mh_client_state(self.client, c.byref(view))
        if status:
            raise Failure(status, "mh_client_state")
        return {"epoch": view.epoch, "connected": view.connected, "leases": view.leases,
                "reconnects": view.reconnects}

    def acquire(self, ref, wait=False, deadline_ms=0):
        error, handle = Error(), c.c_void_p()
        status = self.lib.mh_acquire(self.client, ref.encode(), _acquire_options(wait, deadline_ms),
                                     c.byref(handle), c.byref(error))
        if status:
            raise Failure(status, error.message.decode())
        return Handle(self.lib, handle.value)

    def acquire_set(self, refs, wait=False, deadline_ms=0):
        error, handles = Error(), (c.c_void_p * len(refs))()
        names = (c.c_char_p * len(refs))(*[ref.encode() for ref in refs])
        status = self.lib.mh_acquire_set(self.client, names, len(refs),
                                         _acquire_options(wait, deadline_ms), handles,
                                         c.byref(error))
        if status:
            raise Failure(status, error.message.decode())
        return [Handle(self.lib, handle) for handle in handles]

    def follow(self, ref, wait=False, deadline_ms=0):
        error, live = Error(), c.c_void_p()
        status = self.lib.mh_follow(self.client, ref.encode(), _acquire_options(wait, deadline_ms),
                                    c.byref(live), c.byref(error))
        if status:
            raise Failure(status, error.message.decode())
        return Live(self.lib, live.value)

    def follow_set(self, refs):
        error, live = Error(), c.c_void_p()
        names = (c.c_char_p * len(refs))(*[ref.encode() for ref in refs])
        status = self.lib.mh_follow_set(self.client, names, len(refs), _acquire_options(True, 0),
                                        c.byref(live), c.byref(error))
        if status:
            raise Failure(status, error.message.decode())
        return LiveSet(self.lib, live.value, len(refs))


class Handle:
    def __init__(self, lib, handle):
        self.lib, self.handle = lib, handle

    def release(self):
        self.lib.mh_release(self.handle)
        self.handle = None

    def version(self):
        return self.lib.mh_handle_version(self.handle)

    def generation(self):
        return self.lib.mh_handle_generation(self.handle)

    def superseded(self):
        return self.lib.mh_superseded(self.handle)

    def names(self):
        result = []
        for number in range(self.lib.mh_tensor_count(self.handle)):
            view = TensorView(c.sizeof(TensorView))
            status = self.lib.mh_tensor_at(self.handle, number, c.byref(view))
            if status:
                raise Failure(status, f"mh_tensor_at {number}")
            result.append(view.name.decode())
        return result

    def view(self, name):
        error = Error()
        view = TensorView(c.sizeof(TensorView), c.pointer(error))
        status = self.lib.mh_tensor(self.handle, name.encode(), c.byref(view))
        if status:
            raise Failure(status, error.message.decode())
        return view

    def memory(self, name):
        """The mapped bytes themselves; touching them may fault like any mapping."""
        view = self.view(name)
        return memoryview((c.c_char * view.nbytes).from_address(view.data)).cast("B")

    def copy(self, name):
        """Through mh_copy: a page that cannot be had is a Failure and not a signal."""
        view = self.view(name)
        buffer = c.create_string_buffer(view.nbytes)
        status = self.lib.mh_copy(buffer, view.data, view.nbytes)
        if status:
            raise Failure(status, "mh_copy")
        return buffer.raw

    def file(self, path):
        error = Error()
        view = FileView(c.sizeof(FileView), c.pointer(error))
        status = self.lib.mh_file(self.handle, path.encode(), c.byref(view))
        if status:
            raise Failure(status, error.message.decode())
        data = c.string_at(view.data, view.nbytes) if view.nbytes else b""
        return data, view.fd_path.decode()


class Live:
    def __init__(self, lib, live):
        self.lib, self.live = lib, live

    def adopt(self):
        return Handle(self.lib, self.lib.mh_live_adopt(self.live))

    def release(self):
        self.lib.mh_live_release(self.live)


class LiveSet:
    def __init__(self, lib, live, count):
        self.lib, self.live, self.count = lib, live, count
        self.handles = (c.c_void_p * count)()

    def adopt(self):
        changed = self.lib.mh_live_set_adopt(self.live, self.handles, self.count)
        return changed, [Handle(self.lib, handle) for handle in self.handles]

    def release(self):
        self.lib.mh_live_set_release(self.live)
