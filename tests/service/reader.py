#!/usr/bin/python3
"""A client that reads all the time, in two ways, until its stdin ends; then says what it saw.

usage: reader.py LIBRARY RUNTIME_DIR REF SEED

One thread reads through one handle that it holds from the beginning, another acquires (and waits
where it must), reads and releases over and over. "ready" is printed when both have read once; at the end one JSON line.
"""
import json
import sys
import threading
import time

import cabi
import models

BLOCK = 1 << 20


class Reader(threading.Thread):
    def __init__(self, client, ref, seed, hold):
        super().__init__(daemon=True)
        self.client, self.ref, self.hold = client, ref, hold
        self.expected = models.fill(seed, BLOCK)
        self.counts = {"reads": 0, "bad": 0, "failed": 0, "longest_s": 0.0}
        self.ready = threading.Event()
        self.stop = threading.Event()

    def run(self):
        held = self.client.acquire(self.ref, True, 30000) if self.hold else None
        turn = 0
        while not self.stop.is_set():
            started = time.monotonic()
            try:
                handle = held or self.client.acquire(self.ref, True, 60000)
                self.read(handle, turn)
                if handle is not held:
                    handle.release()
            except cabi.Failure as failure:
                self.counts["failed"] += 1
                self.counts["last_failure"] = str(failure)
            turn += 1
            self.counts["longest_s"] = max(self.counts["longest_s"], time.monotonic() - started)
            if self.counts["reads"] or self.counts["failed"]:
                self.ready.set()

    def read(self, handle, turn):
        """One block of every tensor, another one each turn."""
        for name in handle.names():
            data = handle.memory(name)
            offset = turn % max(len(data) // BLOCK, 1) * BLOCK
            piece = bytes(data[offset:offset + BLOCK])
            if piece != self.expected[:len(piece)]:
                self.counts["bad"] += 1
        self.counts["reads"] += 1


def main():
    library, runtime_dir, ref, seed = sys.argv[1:5]
    library = cabi.Library(library)
    readers = {}
    for name, hold in (("holds", True), ("acquires", False)):
        client = library.connect(runtime_dir, 60000)
        readers[name] = Reader(client, ref, int(seed), hold)
        readers[name].start()
    for reader in readers.values():
        reader.ready.wait()
    print("ready", flush=True)
    sys.stdin.read()
    for reader in readers.values():
        reader.stop.set()
        reader.join()
    print(json.dumps({name: reader.counts for name, reader in readers.items()}), flush=True)


if __name__ == "__main__":
    main()
