#!/usr/bin/python3
"""A client process for tests: commands as JSON lines on stdin, one JSON line back for each.

    {"do": "connect", ...} -> {"ok": true, ...} or {"ok": false, "status": ..., "message": ...}

usage: worker.py LIBRARY RUNTIME_DIR
"""
import hashlib
import json
import mmap
import os
import sys
import time

import cabi
import models


class Worker:
    def __init__(self, library, runtime_dir):
        self.library = cabi.Library(library)
        self.runtime_dir = runtime_dir
        self.client = None
        self.handles = {}
        self.live = None
        self.live_set = None

    def connect(self, deadline_ms=5000):
        self.client = self.library.connect(self.runtime_dir, deadline_ms)
        return self.client.state()

    def state(self):
        return self.client.state()

    def disconnect(self):
        self.client.disconnect()
        self.client = None
        return {}

    def acquire(self, ref, key="a", wait=False, deadline_ms=0):
        started = time.monotonic()
        handle = self.client.acquire(ref, wait, deadline_ms)
        self.handles[key] = handle
        return {"version": handle.version(), "generation": handle.generation(),
                "seconds": time.monotonic() - started}

    def acquire_set(self, refs):
        handles = self.client.acquire_set(refs)
        for ref, handle in zip(refs, handles):
            self.handles[ref] = handle
        return {"versions": [handle.version() for handle in handles]}

    def release(self, key="a"):
        self.handles.pop(key).release()
        return {}

    def tensors(self, key="a"):
        return {"names": self.handles[key].names()}

    def seeds(self, key="a"):
        """Reads every byte of every tensor; which versions they come from."""
        handle, found, nbytes = self.handles[key], set(), 0
        for name in handle.names():
            data = handle.memory(name)
            found |= models.seeds_in(data)
            nbytes += len(data)
        return {"seeds": sorted(found), "bytes": nbytes}

    def digests(self, key="a"):
        """What a client sees of every tensor, and a digest of its bytes as they are mapped."""
        handle, found = self.handles[key], []
        for name in handle.names():
            view = handle.view(name)
            data = handle.memory(name) if view.data else b""
            found.append({"name": name, "dtype": view.dtype.decode(), "nbytes": view.nbytes,
                          "shape": [view.shape[i] for i in range(view.rank)],
                          "strides": [view.strides[i] for i in range(view.rank)]
                                     if view.strides else None,
                          "file": view.file.decode(), "reason": view.reason.decode(),
                          "sha256": hashlib.sha256(data).hexdigest()})
        return {"tensors": found}

    def file_digest(self, path, key="a"):
        data, _ = self.handles[key].file(path)
        return {"sha256": hashlib.sha256(data).hexdigest()}

    def copy(self, name, key="a"):
        data = self.handles[key].copy(name)
        return {"seeds": sorted(models.seeds_in(data))}

    def address(self, name, key="a"):
        return {"address": self.handles[key].view(name).data}

    def inode(self, name, key="a"):
        """Of the memory or file that a tensor is mapped from."""
        address = self.handles[key].view(name).data
        with open("/proc/self/maps") as file:
            for line in file:
                parts = line.split()
                start, end = (int(part, 16) for part in parts[0].split("-"))
                if start <= address < end:
                    return {"inode": int(parts[4])}
        return {"inode": 0}

    def superseded(self, key="a"):
        return {"superseded": self.handles[key].superseded()}

    def file(self, path, key="a"):
        data, fd_path = self.handles[key].file(path)
        with open(fd_path, "rb") as again:
            same = again.read() == data
        return {"text": data.decode(errors="replace"), "same_by_path": same,
                "sha256": hashlib.sha256(data).hexdigest()}

    def reopen(self, path, flags, key="a"):
        """Opens a file's descriptor once more, by its path in /proc; the errno, 0 when it opens."""
        _, fd_path = self.handles[key].file(path)
        try:
            os.close(os.open(fd_path, flags))
        except OSError as error:
            return {"errno": error.errno}
        return {"errno": 0}

    def follow(self, ref):
        self.live = self.client.follow(ref, True, 0)
        return {"version": self.live.adopt().version()}

    def adopt(self):
        handle = self.live.adopt()
        found = set()
        for name in handle.names():
            found |= models.seeds_in(handle.memory(name))
        return {"version": handle.version(), "seeds": sorted(found)}

    def follow_set(self, refs):
        self.live_set = self.client.follow_set(refs)
        return self.adopt_set()

    def adopt_set(self):
        changed, handles = self.live_set.adopt()
        return {"changed": changed, "versions": [handle.version() for handle in handles]}

    def fork_and_read(self, key="a"):
        """A forked child reads what is mapped, then ends; what the daemon sees is the parent's."""
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            try:
                answer = json.dumps(self.seeds(key))
            except Exception as error:  # The child must not run the parent's loop.
                answer = json.dumps({"error": str(error)})
            os.write(write, answer.encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            answer = json.loads(pipe.read())
        os.waitpid(child, 0)
        return answer

    def read_loop(self, ref, seconds):
        """Acquire, read everything, release, for a while; counts what went wrong."""
        counts = {"reads": 0, "mixed": 0, "failed": 0, "versions": {}}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                handle = self.client.acquire(ref, False, 0)
            except cabi.Failure as failure:
                counts["failed"] += 1
                counts["last_failure"] = str(failure)
                continue
            found = set()
            for name in handle.names():
                found |= models.seeds_in(handle.memory(name))
            version = str(handle.version())
            if found != {int(version)}:
                counts["mixed"] += 1
            counts["reads"] += 1
            counts["versions"][version] = counts["versions"].get(version, 0) + 1
            handle.release()
        return counts

    def pid(self):
        return {"pid": os.getpid()}

    def eat(self, nbytes):
        """Takes memory until somebody ends this process."""
        self.eaten = bytearray(nbytes)
        for at in range(0, nbytes, 4096):
            self.eaten[at] = 1
        return {}

    def pss(self):
        """Bytes of proportional set size of all mappings."""
        with open("/proc/self/smaps_rollup") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return {"pss": int(line.split()[1]) * 1024}
        return {"pss": 0}


def main():
    worker = Worker(sys.argv[1], sys.argv[2])
    for line in sys.stdin:
        command = json.loads(line)
        verb = command.pop("do")
        try:
            answer = {"ok": True, **getattr(worker, verb)(**command)}
        except cabi.Failure as failure:
            answer = {"ok": False, "status": failure.status, "message": failure.message}
        except Exception as error:
            answer = {"ok": False, "status": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
