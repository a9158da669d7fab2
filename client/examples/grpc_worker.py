#!/usr/bin/python3
"""A worker without libmodelhost: leases over gRPC, descriptors by ticket, weights by mmap.

Needs grpcio, and the standard library. docs/grpc_workers.md explains each step, for any language.

usage: grpc_worker.py [--runtime-dir DIR] [--tensor NAME] [--follow] [--timeout S] MODEL[:LABEL|@N]

Prints what it was granted and the first values of its tensors (or of --tensor). With --follow it
goes on, and moves to each version that the label then names, until its stream ends.

The modules modelhost.v1.*_pb2* are generated (see the guide) and on PYTHONPATH.
"""
import argparse
import array
import collections
import fcntl
import mmap
import os
import queue
import random
import socket
import struct
import sys
import threading
import time

import grpc

from modelhost.v1 import worker_pb2, worker_pb2_grpc

# Frames of handles.sock (proto/abi/handle_frame.h). Numbers are in host byte order.
MAGIC = 0x4D48
HELLO, HELLO_REPLY, GRANTED, REGION_FDS, FETCH, ERROR, REDEEM = 1, 2, 4, 5, 6, 11, 14
FRAME_ABI = 4  # The first version of the frames that has tickets.
HEADER = struct.Struct("=HHIII")  # magic, type, bytes, request id, descriptors
REGION_REF = struct.Struct("=IIQ")  # region, kind, bytes
SEALED = 2
GRANTED_BYTES, REGION_FDS_BYTES = 248, 32
MOST_BYTES, MOST_FDS = 16384, 64
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

# What struct and memoryview.cast call the types that they know.
FORMATS = {"F32": "f", "F64": "d", "I8": "b", "U8": "B", "I16": "h", "U16": "H", "I32": "i",
           "U32": "I", "I64": "q", "U64": "Q", "BOOL": "?"}


class Refused(Exception):
    """The daemon said no: a canonical code (google.rpc.Code) and why."""

    def __init__(self, code, message):
        super().__init__(f"code {code}: {message}")
        self.code = code


class Handles:
    """One connection to handles.sock, where tickets become descriptors."""

    def __init__(self, path, timeout=10.0):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self.socket.settimeout(timeout)
        self.socket.connect(path)
        self._send(HELLO, struct.pack("=IIQ", FRAME_ABI, FRAME_ABI, 0))
        _, fds = self._receive(HELLO_REPLY)
        for fd in fds:
            os.close(fd)  # The catalogue page; a stream tells us of changes too.

    def close(self):
        self.socket.close()

    def _send(self, kind, payload):
        self.socket.send(HEADER.pack(MAGIC, kind, HEADER.size + len(payload), 1, 0) + payload)

    def _receive(self, *expected):
        """One frame and its descriptors."""
        frame, ancillary, flags, _ = self.socket.recvmsg(
            MOST_BYTES, socket.CMSG_SPACE(MOST_FDS * 4), socket.MSG_CMSG_CLOEXEC)
        fds = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[:len(data) - len(data) % fds.itemsize])
        if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or len(frame) < HEADER.size:
            raise ConnectionError("handles.sock: the connection ended, or a frame was cut")
        magic, kind, size, _, count = HEADER.unpack_from(frame)
        if magic != MAGIC or size != len(frame) or count != len(fds):
            raise ConnectionError("handles.sock: that is no frame")
        if kind == ERROR:
            code, length = struct.unpack_from("=II", frame, HEADER.size)
            raise Refused(code, frame[HEADER.size + 8:HEADER.size + 8 + length].decode())
        if kind not in expected:
            raise ConnectionError(f"handles.sock: a frame of type {kind}")
        return frame, list(fds)

    def redeem(self, ticket):
        """The descriptor of the index, and {region: (descriptor, kind, bytes)}."""
        self._send(REDEEM, ticket)
        frame, fds = self._receive(GRANTED)
        wanted, = struct.unpack_from("=I", frame, 52)  # Granted.regions
        index, fds = fds[0], fds[1:]
        regions = {}
        offset = GRANTED_BYTES
        while True:
            for fd in fds:
                number, kind, size = REGION_REF.unpack_from(frame, offset)
                offset += REGION_REF.size
                regions[number] = (fd, kind, size)
            if len(regions) == wanted:
                return index, regions
            frame, fds = self._receive(REGION_FDS)
            offset = REGION_FDS_BYTES

    def fetch(self, lease, region):
        """A descriptor of its own of any file of a redeemed lease: (descriptor, kind, bytes)."""
        self._send(FETCH, struct.pack("=QII", lease, region, 0))
        frame, fds = self._receive(REGION_FDS)
        _, kind, size = REGION_REF.unpack_from(frame, REGION_FDS_BYTES)
        return fds[0], kind, size


def map_region(fd, kind, size):
    """All of a region, read-only. The mapping stays good whatever becomes of the daemon."""
    try:
        if kind == SEALED and fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise PermissionError("a seal is missing: somebody could still write to it")
        if os.fstat(fd).st_size != size:
            raise ValueError(f"{os.fstat(fd).st_size} bytes where {size} were announced")
        return mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


class Session:
    """The stream that holds the leases. They end with it, however it ends."""

    def __init__(self, stub):
        self._requests = queue.Queue()
        self._events = queue.Queue()
        self._later = collections.deque()
        self._last_id = 0
        self._call = stub.Session(iter(self._requests.get, None))
        threading.Thread(target=self._read, daemon=True).start()
        self.opened = self.event(10).opened

    def _read(self):
        try:
            for event in self._call:
                self._events.put(event)
            self._events.put(ConnectionError("the stream has ended"))
        except grpc.RpcError as error:
            self._events.put(error)

    def event(self, timeout=None):
        """The next event that is no answer. queue.Empty: there was none in time."""
        while not self._later:
            event = self._next(timeout)
            if event.request_id == 0:
                return event
            self._unwanted(event)
        return self._later.popleft()

    def _next(self, timeout):
        event = self._events.get(timeout=timeout)
        if isinstance(event, Exception):
            self._events.put(event)  # For whoever asks next.
            raise event
        return event

    def _unwanted(self, answer):
        """Whoever asked waits no more: a lease that comes now would be nobody's."""
        for grant in answer.granted.grants:
            self._requests.put(worker_pb2.SessionRequest(
                release=worker_pb2.ReleaseRequest(lease=grant.lease)))

    def _ask(self, timeout, **request):
        self._last_id += 1
        self._requests.put(worker_pb2.SessionRequest(request_id=self._last_id, **request))
        while True:
            event = self._next(timeout)
            if event.request_id == 0:
                self._later.append(event)
            elif event.request_id != self._last_id:
                self._unwanted(event)
            elif event.HasField("error"):
                raise Refused(event.error.code, event.error.message)
            else:
                return event

    def acquire(self, ref, timeout=10.0):
        request = worker_pb2.AcquireRequest(refs=[ref])
        request.timeout.FromNanoseconds(int(timeout * 1e9))
        return self._ask(timeout + 10, acquire=request).granted.grants[0]

    def release(self, lease):
        self._ask(10, release=worker_pb2.ReleaseRequest(lease=lease))

    def close(self):
        self._requests.put(None)  # Half-closes the stream: the leases end.


def index_pages(stub, ref, patience=60.0):
    """The pages of an index; again while too many processes of this user read theirs."""
    until, pause = time.monotonic() + patience, 0.05
    while True:
        try:
            return list(stub.GetIndex(worker_pb2.GetIndexRequest(ref=ref), timeout=60))
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED or time.monotonic() > until:
                raise
        time.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(2 * pause, 2.0)


class Model:
    """One version, mapped. Its lease is the session's; its bytes stay while this lives."""

    def __init__(self, stub, handles, grant):
        self.grant = grant
        index_fd, regions = handles.redeem(grant.ticket)
        os.close(index_fd)  # The same index as flat tables; this worker takes the pages.
        self.regions = {number: map_region(*region) for number, region in regions.items()}
        self.components, self.tensors, self.files = [], {}, {}
        ref = worker_pb2.WorkerRef(model=grant.model, version=grant.version, digest=grant.digest)
        for page in index_pages(stub, ref):
            self.components += page.components  # All of them come before the first tensor.
            self.tensors.update((self.key(tensor), tensor) for tensor in page.tensors)
            self.files.update((file.path, file) for file in page.files)

    def key(self, tensor):
        """Names are unique within a component: of several, it stands before the name."""
        if len(self.components) == 1:
            return tensor.name
        return f"{self.components[tensor.component].name}/{tensor.name}"

    def tensor(self, name):
        """The bytes of a tensor, as a view of its values where Python knows the type."""
        entry = self.tensors[name]
        if not entry.mappable:
            raise ValueError(f"{name}: {entry.reason}")
        view = memoryview(self.regions[entry.region])[entry.offset:entry.offset + entry.nbytes]
        return view.cast(FORMATS[entry.dtype]) if entry.dtype in FORMATS else view


def attach(stub, handles, session, ref, timeout):
    grant = session.acquire(ref, timeout)
    try:
        return Model(stub, handles, grant)
    except BaseException:
        session.release(grant.lease)
        raise


def parse_ref(text):
    """MODEL, MODEL:LABEL or MODEL@N."""
    if "@" in text:
        model, version = text.split("@", 1)
        return worker_pb2.WorkerRef(model=model, version=int(version))
    model, _, label = text.partition(":")
    return worker_pb2.WorkerRef(model=model, label=label)


def runtime_dir():
    for place in (os.environ.get("MODELHOST_RUNTIME_DIR"),
                  os.path.join(os.environ.get("XDG_RUNTIME_DIR", f"/tmp/modelhost-{os.getuid()}"),
                               "modelhost"), "/run/modelhost"):
        if place and os.path.exists(os.path.join(place, "control.sock")):
            return place
    raise SystemExit("error: no daemon is here (start modelhostd, or say --runtime-dir)")


def show(model, name):
    grant = model.grant
    print(f"{grant.model}@{grant.version} generation {grant.generation}: "
          f"{len(model.tensors)} tensors", flush=True)
    for key in [name] if name else sorted(model.tensors)[:4]:
        print(f"  {key} {model.tensors[key].dtype} {list(model.tensors[key].shape)}: "
              f"{list(model.tensor(key)[:4])}", flush=True)


def follow(stub, handles, session, model, ref, name, timeout):
    while True:
        event = session.event()
        moved, lease = event.HasField("generation_changed"), model.grant.lease
        if moved and event.generation_changed.version == 0:
            print("  no version to move to; going on with what is mapped", flush=True)
        elif moved or (event.HasField("evicted") and event.evicted.lease == lease):
            # First the new one, then the old one goes: there is always a model to work with. Events
            # are of labels that a lease is held of, so without one there is nothing to wait for.
            try:
                newer = attach(stub, handles, session, ref, timeout)
            except Refused as refusal:
                if not moved:
                    raise
                print(f"  {refusal}; going on with what is mapped", flush=True)
                continue
            model = newer
            try:
                session.release(lease)
            except Refused:
                pass  # It was evicted meanwhile.
            show(model, name)
        elif event.HasField("closing"):
            print("  the daemon ends; what is mapped stays good", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("ref", metavar="MODEL[:LABEL|@N]")
    parser.add_argument("--runtime-dir")
    parser.add_argument("--tensor")
    parser.add_argument("--follow", action="store_true")
    parser.add_argument("--timeout", type=float, default=10.0)
    arguments = parser.parse_args()
    place = arguments.runtime_dir or runtime_dir()
    ref = parse_ref(arguments.ref)
    with grpc.insecure_channel(f"unix:{place}/control.sock") as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        session = Session(stub)
        handles = Handles(f"{place}/handles.sock")
        model = attach(stub, handles, session, ref, arguments.timeout)
        show(model, arguments.tensor)
        if arguments.follow:
            follow(stub, handles, session, model, ref, arguments.tensor, arguments.timeout)
        session.release(model.grant.lease)
        session.close()


if __name__ == "__main__":
    try:
        main()
    except Refused as refusal:
        sys.exit(f"error: {refusal}")
    except grpc.RpcError as error:
        sys.exit(f"error: {error.code().name}: {error.details()}")
