#!/usr/bin/env python3
"""Writes the seeds of the device agent's fuzzers: frames as agent_wire.h lays them out."""
import pathlib
import struct

HERE = pathlib.Path(__file__).resolve().parent
MAGIC = 0x4D48  # abi::kFrameMagic
UUID = b"GPU-00fafafa-fafa-fafa-fafa-fafafafafa00"
REQUEST = struct.Struct("<HHIII II QQQQ II Q II 64s 48s 256s 256s")
ITEM = struct.Struct("<QQQII")
REPLY = struct.Struct("<HHIII IIII QQQQQ 64s 768s 48s 96s 768s Ii QQ")


def request(frame, fds=0, size=0, segment=0, items=(), direct=0, tests=(0, 0), failure=b""):
    head = REQUEST.pack(MAGIC, frame, REQUEST.size, 7, fds, 0, 1, size, segment, len(items), 1 << 27,
                        4, direct, 99, *tests, b"\x01" * 64, UUID, failure, failure)
    return bytes([fds]) + head + b"".join(ITEM.pack(*item, 0) for item in items)


def reply(frame, fds=0, code=0, text=b"", mode=1, devices=1):
    return bytes([fds]) + REPLY.pack(
        MAGIC, frame, REPLY.size, 7, fds, code, 0, devices, 0, 3, 1 << 21, 5, 6, 7, b"\x02" * 64, text,
        UUID, b"Fake GPU 0", b"the self-test exported", mode, 13000, 1 << 30, 1 << 21)


SEEDS = {
    "request": {
        "list": request(0x101), "open": request(0x102),
        "open_tried": request(0x102, tests=(3, 2), failure=b"it compiles no PTX"),
        "create": request(0x103, size=1 << 21),
        "upload": request(0x104, 3, 1 << 21, items=[(0, 4096, 13, 0), (4608, 7, 3, 0)]),
        "upload_empty": request(0x104, 2, 1 << 21),
        "upload_legacy": request(0x104, 3, 4096, 5, [(0, 1, 0, 1), (8, 4088, 1 << 40, 0)], 1),
        "verify": request(0x105, 1, 1 << 21), "release": request(0x106, segment=5),
        "memory": request(0x107), "cancel": request(0x108), "check": request(0x109, 1, 1 << 21),
        "try_import": request(0x10A), "try_host_read": request(0x10B)},
    "reply": {
        "created": reply(0x181, 1), "failed": reply(0x181, 0, 8, b"the device is full"),
        "progress": reply(0x182), "no_driver": reply(0x181, 0, 0, b"no CUDA driver", 0, 0),
        "legacy": reply(0x181, mode=4)},
}

for folder, seeds in SEEDS.items():
    (HERE / folder).mkdir(exist_ok=True)
    for name, content in seeds.items():
        (HERE / folder / name).write_bytes(content)
