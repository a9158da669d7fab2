#!/usr/bin/python3
"""A process of `tests/bench/run --only python_attach`: gets weights in one of three ways, on command.

usage: python_attach.py modelhost RUNTIME_DIR REF
       python_attach.py torch FILE             torch.load of a checkpoint
       python_attach.py safetensors FILE       the file read and its header parsed in Python
       python_attach.py attach RUNTIME_DIR REF FILE ROUNDS

Says "ready" once all is imported, then answers each line of its input with one of JSON:
  load    gets the weights as torch tensors: {"ms"}
  touch   reads every byte of them: {"bytes"}
  pss     {"pss": bytes of the mappings that the weights are in, "files": [[device, inode], ...]}
`attach` measures ROUNDS rounds instead, and prints {"attach_us", "items_us", "parse_us"}: p50 of connecting,
acquiring and one tensor's address; of the same with all tensor objects; of parsing FILE's header.
"""
import json
import os
import statistics
import struct
import sys
import time


def header_of(path):
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return 8 + length, json.loads(file.read(length))


def read_safetensors(path):
    import torch
    start, header = header_of(path)
    data = bytearray(os.stat(path).st_size - start)
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        view = memoryview(data)
        while view:  # A read gives 2 GiB at most.
            view = view[file.readinto(view):]
    made = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        made[name] = torch.frombuffer(data, dtype=torch.int64, offset=begin,
                                      count=(end - begin) // 8).reshape(entry["shape"])
    return made


def load_with_modelhost(runtime, ref):
    import modelhost
    return modelhost.connect(runtime).acquire(ref).torch()


def load_with_torch(path):
    import torch
    return torch.load(path)


def mappings(path, wanted):
    """(first, last, device, inode, pss) of the mappings of a process that `wanted` accepts."""
    found, current = [], None
    with open(path) as file:
        for line in file:
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                first, last = (int(each, 16) for each in words[0].split("-"))
                current = (first, last, words[3], int(words[4]))
            elif words[0] == "Pss:" and wanted(*current):
                found.append((*current, int(words[1]) * 1024))
    return found


def available():
    """Bytes of memory that this machine has to give."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))


def weights_pss(tensors):
    ranges = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nelement() * tensor.element_size())
                    for tensor in tensors.values())

    def has_weights(first, last, *_):
        return any(begin < last and first < end for begin, end in ranges)

    rows = mappings("/proc/self/smaps", has_weights)
    return {"pss": sum(row[4] for row in rows),
            "files": sorted({(row[2], row[3]) for row in rows if row[3] != 0})}


def measure_attach(runtime, ref, path, rounds):
    import modelhost
    _, header = header_of(path)
    name = next(iter(header))
    attach, items, parse = [], [], []
    for turn in range(rounds + 5):
        started = time.perf_counter()
        with modelhost.connect(runtime) as client, client.acquire(ref) as handle:
            address = handle[name].data_ptr
            first = time.perf_counter()
            objects = dict(handle.items())
            every = time.perf_counter()
            assert address == objects[name].data_ptr
        if turn >= 5:  # After what only the first ones pay.
            attach.append(first - started)
            items.append(every - started)
    for _ in range(max(3, rounds // 20)):
        started = time.perf_counter()
        header_of(path)
        parse.append(time.perf_counter() - started)
    print(json.dumps({key: 1e6 * statistics.median(values) for key, values in (
        ("attach_us", attach), ("items_us", items), ("parse_us", parse))}))


def main(mode, *arguments):
    import torch
    if mode == "attach":
        runtime, ref, path, rounds = arguments
        measure_attach(runtime, ref, path, int(rounds))
        return
    if mode == "modelhost":
        import modelhost.torch  # noqa: F401
    load = {"modelhost": load_with_modelhost, "torch": load_with_torch,
            "safetensors": read_safetensors}[mode]
    torch.set_num_threads(1)
    print("ready", flush=True)
    tensors = {}
    for line in sys.stdin:
        command = line.strip()
        if command == "load":
            tensors.clear()
            started = time.perf_counter()
            tensors = load(*arguments)
            answer = {"ms": 1e3 * (time.perf_counter() - started), "tensors": len(tensors)}
        elif command == "touch":
            answer = {"bytes": 0}
            for tensor in tensors.values():
                tensor.sum()
                answer["bytes"] += tensor.nelement() * tensor.element_size()
        else:
            answer = weights_pss(tensors)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
