"""The frames of handles.sock (proto/abi/handle_frame.h), for clients that do not behave."""
import array
import os
import socket
import struct

MAGIC = 0x4D48
(HELLO, HELLO_REPLY, ACQUIRE, GRANTED, REGION_FDS, FETCH, RELEASE, SUBSCRIBE, ACK, EVENT, ERROR,
 UPLOAD, DEVICE_FDS, REDEEM) = range(1, 15)
HEADER = struct.Struct("=HHIII")
NAME_BYTES = 72
WAIT = 1


class Closed(Exception):
    """The daemon ended the connection."""


def header(kind, payload_bytes, request, fds=0):
    return HEADER.pack(MAGIC, kind, HEADER.size + payload_bytes, request, fds)


def hello(request=1, abi_min=1, abi_max=1):
    payload = struct.pack("=IIQ", abi_min, abi_max, 0)
    return header(HELLO, len(payload), request) + payload


def ref(model, label="stable", version=0):
    return (model.encode().ljust(NAME_BYTES, b"\0") +
            (label if not version else "").encode().ljust(NAME_BYTES, b"\0") +
            struct.pack("=Q32s", version, b""))


def acquire(refs, request=2, flags=0, deadline_ms=0, count=None):
    payload = struct.pack("=IIQ", flags, len(refs) if count is None else count, deadline_ms)
    payload += b"".join(refs)
    return header(ACQUIRE, len(payload), request) + payload


def release(lease, request=3):
    payload = struct.pack("=Q", lease)
    return header(RELEASE, len(payload), request) + payload


def fetch(lease, region, request=5):
    payload = struct.pack("=QII", lease, region, 0)
    return header(FETCH, len(payload), request) + payload


def upload(ticket, request=6, first=0, last=1, fds=1):
    payload = struct.pack("=16sII", ticket, first, last)
    return header(UPLOAD, len(payload), request, fds) + payload


def redeem(ticket, request=7):
    payload = struct.pack("=16s", ticket)
    return header(REDEEM, len(payload), request) + payload


def subscribe(request=4):
    return header(SUBSCRIBE, 0, request)


class RawClient:
    """One connection; frames in, frames and descriptors out. Descriptors are closed with it."""

    def __init__(self, path, timeout=10.0):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(timeout)
        self.socket.connect(str(path))
        self.fds = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        for fd in self.fds:
            os.close(fd)
        self.fds = []
        self.socket.close()

    def send(self, frame, fds=()):
        ancillary = []
        if fds:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        try:
            self.socket.sendmsg([frame], ancillary)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Closed from error

    def receive(self):
        """(type, request, frame, descriptors of this frame)"""
        try:
            data, ancillary, flags, _ = self.socket.recvmsg(1 << 16, socket.CMSG_SPACE(64 * 4))
        except ConnectionResetError as error:
            raise Closed from error
        if not data:
            raise Closed
        if flags & socket.MSG_CTRUNC:
            raise AssertionError("the kernel dropped descriptors")
        fds = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content[:len(content) // fds.itemsize * fds.itemsize])
        self.fds.extend(fds)
        magic, kind, size, request, count = HEADER.unpack_from(data)
        assert magic == MAGIC and size == len(data) and count == len(fds), (kind, size, len(data))
        return kind, request, data, list(fds)

    def greet(self):
        self.send(hello())
        kind, _, frame, fds = self.receive()
        assert kind == HELLO_REPLY and len(fds) == 1, error_text(frame)
        return frame

    def grant(self, model, **arguments):
        """(lease, version) of an Acquire that is granted; all its descriptors are taken."""
        self.send(acquire([ref(model, **arguments)]))
        kind, _, frame, _ = self.receive()
        assert kind == GRANTED, error_text(frame)
        lease, version = struct.unpack_from("=QQ", frame, 24)
        regions, = struct.unpack_from("=I", frame, 52)
        have, = struct.unpack_from("=I", frame, 240)
        while have < regions:
            kind, _, more, fds = self.receive()
            assert kind == REGION_FDS, kind
            have += len(fds)
        return lease, version


def error_text(frame):
    kind = HEADER.unpack_from(frame)[1]
    if kind != ERROR:
        return f"frame of type {kind}"
    code, length = struct.unpack_from("=II", frame, HEADER.size)
    return f"code {code}: {frame[HEADER.size + 8:HEADER.size + 8 + length].decode()}"
