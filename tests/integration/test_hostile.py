"""Peers that mean harm, on both sockets: made-up names and ids, crowds that say nothing, readers
that do not read. docs/lifecycle_faults.md says which fault each case stands for."""
import os
import re
import socket
import time
import unittest

import frames
from harness import CLIENT, GUEST, STRANGER, Case, as_peer, footprint, many, needs_root, wait_for

(OK, CANCELLED, UNKNOWN, INVALID, DEADLINE, NOT_FOUND, EXISTS, DENIED, EXHAUSTED, PRECONDITION, ABORTED,
 RANGE, UNIMPLEMENTED, INTERNAL, UNAVAILABLE, DATA_LOSS, UNAUTHENTICATED) = range(17)
NAME_OF = {2: "UNKNOWN", 13: "INTERNAL", 12: "UNIMPLEMENTED", 14: "UNAVAILABLE"}
MIB = 1 << 20

# Names that are none. A model's, a label's, a file's path, an operation's id, a residency, a
# strategy, a requirement, and whatever other text crosses a socket.
EVIL_NAMES = [
    "..", ".", "../..", "../outside", "a/../../outside", "/etc/passwd", "//", "/", "planner/../outside",
    "versions/1", "planner\0", "\0", "-rf", "--config", "planner\n", "\x1b[2J", "Planner", "plänner",
    "p" * 65, "p" * 4000, "%2e%2e%2f", "..\\..\\outside", "~", "$(id)", "`id`", "planner;id", " ",
    "incoming", "..planner/..", "\u202eplanner", "op-0", "op--1", "op-99999999999999999999999",
    "op-18446744073709551616", "planner@1", "planner:stable",
]
EVIL_NUMBERS = [0, 1, 2, 99, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1]
# What may be done without rights to command. The rest must be refused to whoever may only read.
READ_CALLS = {"GetStatus", "ListModels", "GetModel", "ListVersions", "GetVersion", "WatchModels",
              "PlanSwap", "PlanDelete", "PlanGarbage", "GetOperation", "ListOperations",
              "WatchOperation", "ListClients", "ListLeases", "WatchEvents", "GetConfig",
              "Session", "Resolve", "GetIndex"}


class Served(Case):
    """A daemon with one model, and ways to see that it goes on serving."""

    def setUp(self):
        super().setUp()
        self.serve("planner", 1)

    def raw(self, uid=CLIENT):
        with as_peer(uid):
            return frames.RawClient(self.daemon.handles_socket)

    def still_serves(self):
        self.daemon.check_alive()
        client = self.client()
        self.assertEqual(client.ok("acquire", ref="planner")["version"], 1)
        self.assertEqual(client.ok("seeds")["seeds"], [1])
        client.close()
        self.ctl("status")

    def tree(self):
        """Every path below the daemon's folder and beside it, but for what it writes all the time."""
        return {str(path) for path in self.folder.rglob("*") if "src-" not in str(path)}


class BogusNamesAndIds(Served):
    def fields(self, methods):
        """(method, field, type) of every request, with one that holds it."""
        for method, request in methods.items():
            for field, kind in request.items():
                yield method, field, kind

    def requests_with(self, field, kind, value):
        """Requests of whose fields one has `value`."""
        if kind == "string":
            yield {field: value}
        elif kind == "string[]":
            yield {field: [value]}
        elif kind == "modelhost.v1.SwapTarget[]":
            yield {field: [{"model": value, "version": "1"}]}
            yield {field: [{"model": "planner", "version": "1"}, {"model": value, "version": "1"}]}
        elif kind == "modelhost.v1.WorkerRef":
            yield {field: {"model": value}}
            yield {field: {"model": "planner", "label": value}}
            yield {field: {"model": "planner", "digest": value}}
        elif kind == "modelhost.v1.AcquireRequest":
            yield {field: {"refs": [{"model": value}]}}
            yield {field: {"refs": [{"model": "planner"}], "gpu": value}}
        elif kind == "modelhost.v1.PublishBegin":
            good = {"model": "planner", "version": "7", "files": [{"path": "a.bin", "bytes": "1"}]}
            yield {field: {**good, "model": value}}
            yield {field: {**good, "residency": value}}
            yield {field: {**good, "files": [{"path": value, "bytes": "1"}]}}
            yield {field: {**good, "files": [{"path": "sub/" + value, "bytes": "1"}]}}
            yield {field: {**good, "requirements": {value: "1"}}}
            yield {field: {**good, "requirements": {"tensorrt": value}}}

    def check(self, rpc, method, request, what):
        answer = rpc.call(method, request, deadline_s=1 if method.startswith("Watch") else 20)
        self.assertNotIn(answer["code"], NAME_OF, f"{what}: {answer}")
        if answer["code"] not in (OK, DEADLINE):
            self.assertTrue(answer["reason"], f"{what}: {answer}")
            self.assertFalse(any(ord(c) < 0x20 or 0x7f <= ord(c) < 0xa0 for c in answer["message"]),
                             f"{what}: {answer}")
        return answer

    def test_a_name_that_is_none_is_refused_in_words_and_leaves_no_trace(self):
        before, calls = self.tree(), 0
        rpc = self.rpc()
        leaves = []
        for method, field, kind in self.fields(rpc.methods()):
            for name in EVIL_NAMES:
                for request in self.requests_with(field, kind, name):
                    if field not in ("model", "version"):
                        request.setdefault("model", "planner")
                    request = {key: value for key, value in request.items()
                               if key in rpc.methods()[method]}
                    what = f"{method} {field} {name[:40]!r}"
                    answer = self.check(rpc, method, request, what)
                    calls += 1
                    for response in answer["responses"]:
                        operation = response.get("operation", response)
                        if operation.get("state") == "SUCCEEDED" and field == "model":
                            leaves.append(what)
        self.assertEqual(leaves, [], "operations that succeeded on a name that is none")
        self.assertGreater(calls, 200)
        print(f"{calls} calls", end=" ", flush=True)
        self.assertEqual({path for path in self.tree() - before
                          if "/store/" in path or "outside" in path}, set())
        self.still_serves()

    def test_an_id_that_is_none_is_refused_in_words(self):
        rpc, calls = self.rpc(), 0
        for method, field, kind in self.fields(rpc.methods()):
            if kind not in ("uint64", "uint32", "int64", "int32"):
                continue
            for number in EVIL_NUMBERS:
                if kind.endswith("32") and number >= 2**31:
                    continue
                if kind == "int64" and number >= 2**63:
                    continue
                request = {field: str(number)}
                if "model" in rpc.methods()[method]:
                    request.setdefault("model", "planner")
                if (method, field, number) in (("Load", "version", 1), ("Verify", "version", 1)):
                    continue  # That one is there.
                self.check(rpc, method, request, f"{method} {field} {number}")
                calls += 1
        self.assertGreater(calls, 50)
        self.assertEqual(self.version_row("planner", 1)["state"], "READY")
        self.still_serves()

    def test_ids_of_frames_that_nobody_gave_out(self):
        lease_ids = [0, 1, 2**31, 2**63, 2**64 - 1]
        with self.raw() as client:
            client.greet()
            mine, _ = client.grant("planner")
            # What is released a second time, or was never held, changes nothing for anybody.
            for lease in lease_ids:
                if lease != mine:
                    client.send(frames.release(lease, request=9))
            self.wait_leases(1)
        for lease in (*lease_ids, None):
            for region in (0, 1, 77, 2**32 - 1):
                with self.raw() as client:
                    client.greet()
                    mine, _ = client.grant("planner")
                    if lease is None and region == 0:
                        continue
                    try:
                        client.send(frames.fetch(mine if lease is None else lease, region))
                        kind, _, frame, fds = client.receive()
                    except frames.Closed:
                        continue
                    if lease is None and region == 1:
                        continue  # A file that there is.
                    if lease == mine:
                        continue
                    self.assertEqual(kind, frames.ERROR, (lease, region))
                    self.assertEqual(fds, [])
        for ticket in (b"\0" * 16, b"\xff" * 16, os.urandom(16)):
            with self.raw() as client:
                client.greet()
                read, write = os.pipe()
                try:
                    client.send(frames.upload(ticket), [read])
                    kind, _, _, _ = client.receive()
                    self.assertEqual(kind, frames.ERROR)
                except frames.Closed:
                    pass
                finally:
                    os.close(read)
                    os.close(write)
        self.wait_leases(0)
        self.still_serves()

    def test_references_of_frames_that_name_nothing(self):
        names = [name for name in EVIL_NAMES if len(name.encode()) <= 72 and "\0" not in name]
        for name in names:
            for reference in (frames.ref(name), frames.ref("planner", label=name)):
                with self.subTest(name=name), self.raw() as client:
                    client.greet()
                    client.send(frames.acquire([reference]))
                    try:
                        kind, _, frame, fds = client.receive()
                    except frames.Closed:
                        continue
                    self.assertEqual((kind, fds), (frames.ERROR, []), name)
                    text = frames.error_text(frame).split(": ", 1)[1]
                    self.assertTrue(text.isprintable(), repr(text))
        self.still_serves()


class Rights(Served):
    @needs_root
    def test_every_call_that_changes_something_is_refused_to_who_may_only_read(self):
        requests = {"Swap": {"targets": [{"model": "planner", "version": "1"}]},
                    "GetOperation": {"id": "op-1"}, "CancelOperation": {"id": "op-1"},
                    "EvictLease": {"lease": "1"}, "WatchOperation": {"id": "op-1"},
                    "Resolve": {"ref": {"model": "planner"}},
                    "GetIndex": {"ref": {"model": "planner"}}}
        for user, refused in ((CLIENT, lambda m: m not in READ_CALLS),
                              (STRANGER, lambda m: True), (GUEST, lambda m: True)):
            rpc = self.rpc(user=user)
            for method, fields in rpc.methods().items():
                request = {key: value for key, value in
                           {"model": "planner", "version": "1", "label": "stable",
                            **requests.get(method, {})}.items() if key in fields}
                if "begin" in fields:
                    request = {"begin": {"model": "planner", "version": "7"}}
                answer = rpc.call(method, request, deadline_s=1 if method.startswith("Watch") else 20)
                if refused(method):
                    self.assertEqual(answer["code"], DENIED, f"{user} {method}: {answer}")
                    self.assertTrue(answer["reason"])
                else:
                    self.assertNotEqual(answer["code"], DENIED, f"{user} {method}: {answer}")
        self.assertIn("event=refused", self.daemon.log.read_text())
        self.still_serves()


class Crowds(Served):
    def connect(self, name, kind, uid=CLIENT):
        with as_peer(uid):
            peer = socket.socket(socket.AF_UNIX, kind)
            peer.connect(str(self.daemon.runtime / name))
            return peer

    def crowd(self, name, kind, first_words):
        """500 connections that say no more than `first_words`, one of them each. The sockets."""
        peers = []
        for number in range(500):
            peer = self.connect(name, kind)
            words = first_words[number % len(first_words)]
            try:
                if words:
                    peer.sendall(words)
            except (BrokenPipeError, ConnectionResetError):
                pass
            peer.setblocking(False)
            peers.append(peer)
        self.addCleanup(lambda: [peer.close() for peer in peers])
        return peers

    @staticmethod
    def ended(peer):
        try:
            while True:
                if not peer.recv(65536):
                    return True
        except BlockingIOError:
            return False
        except OSError:
            return True

    def stalled(self, name, kind, words, deadline_s):
        pid = self.daemon.process.pid
        self.still_serves()
        before = footprint(pid)
        peers = self.crowd(name, kind, words)
        # Others are served while they all stand there.
        for _ in range(5):
            self.still_serves()
        during = footprint(pid)
        started = time.monotonic()
        wait_for("all of them to be ended", lambda: all(self.ended(peer) for peer in peers), deadline_s)
        print(f"{name}: rss {before['rss'] >> 20} -> {during['rss'] >> 20} MiB, ended after "
              f"{time.monotonic() - started:.0f} s", end=" ", flush=True)
        self.assertLess(during["rss"] - before["rss"], 64 * MIB)
        wait_for("the descriptors to be closed", lambda: footprint(pid)["fds"] <= before["fds"] + 8)
        self.still_serves()

    def test_500_that_connect_and_stall_on_the_handles_socket(self):
        good = frames.hello()
        self.stalled("handles.sock", socket.SOCK_SEQPACKET, [b"", good[:7], b"\0"], 60)

    def test_500_that_connect_and_stall_on_the_control_socket(self):
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        settings = b"\0\0\0\x04\0\0\0\0\0"
        # 12 bytes of headers are announced, four are sent.
        headers = preface + settings + b"\0\0\x0c\x01\x04\0\0\0\x01\x82\x86\x84\x41"
        self.stalled("control.sock", socket.SOCK_STREAM,
                     [b"", preface[:10], preface, preface + settings, preface + settings[:5], headers], 120)


class SlowReaders(Served):
    def test_streams_that_nobody_reads_stop_nothing_and_cost_little(self):
        self.publish("planner", 2)
        self.ctl("load", "planner@2")
        pid = self.daemon.process.pid
        before = footprint(pid)
        held = [self.rpc() for _ in range(6)]
        for rpc in held:
            for method in ("WatchModels", "WatchEvents"):
                if method in rpc.methods():
                    rpc.call(method, hold=True)
        with self.raw() as deaf:
            deaf.greet()
            deaf.send(frames.subscribe())
            for number in range(many(60, 1000)):
                self.ctl("swap", "planner", "--version", 2 - number % 2, "--progress", "none")
            self.ctl("swap", "planner", "--version", "1")
        self.assertLess(footprint(pid)["rss"] - before["rss"], 32 * MIB)
        self.still_serves()
        for rpc in held:
            rpc.close()

    def test_an_operation_goes_on_when_its_stream_is_lost_or_not_read(self):
        self.publish("big", 1, tensors=4, tensor_bytes=32 * MIB)
        lost = self.rpc()
        operation = lost.call("Load", {"model": "big", "version": "1"}, hold=True)
        identity = operation["responses"][0]["operation"]["id"]
        lost.close()
        rpc = self.rpc()
        state = wait_for("it to end", lambda: [
            one["state"] for one in rpc.call("GetOperation", {"id": identity})["responses"]
            if one["state"] not in ("QUEUED", "RUNNING")])
        self.assertEqual(state, ["SUCCEEDED"])
        self.assertEqual(self.version_row("big", 1)["state"], "READY")


class AgainstEachOther(Served):
    def test_unload_during_a_load_ends_both_in_words_and_the_state_is_true(self):
        self.publish("big", 1, tensors=8, tensor_bytes=8 * MIB)
        for _ in range(many(3, 50)):
            loading = self.daemon.ctl_start("load", "big@1")
            wait_for("the load to begin",
                     lambda: self.version_row("big", 1)["state"] != "STAGED" or loading.poll() is not None)
            unload = self.daemon.ctl("unload", "big@1")
            _, text = loading.communicate(timeout=60)
            self.assertIn(unload.code, (0, 4, 11), str(unload))
            self.assertIn(loading.returncode, (0, 4, 11), text)
            state = wait_for("a state of rest", lambda: (
                lambda s: s if s in ("READY", "STAGED") else None)(self.version_row("big", 1)["state"]))
            held = self.json("status")
            if state == "READY":
                self.ctl("unload", "big@1")
            self.assertEqual(self.version_row("big", 1)["state"], "STAGED", held)
        self.still_serves()

    def test_the_same_load_twice_is_one_load_and_both_are_told_the_truth(self):
        self.publish("big", 1, tensors=8, tensor_bytes=8 * MIB)
        both = [self.daemon.ctl_start("load", "big@1") for _ in range(2)]
        for one in both:
            _, text = one.communicate(timeout=60)
            self.assertEqual(one.returncode, 0, text)
        loads = re.findall("event=load model=big .*outcome=", self.daemon.log.read_text())
        self.assertEqual(len(loads), 1, loads)
        # A load of what cannot be loaded fails every time that it is asked for.
        stored = self.daemon.store / "models/big/versions/1/model.safetensors"
        self.ctl("unload", "big@1")
        stored.chmod(0o644)
        with open(stored, "r+b") as file:
            file.seek(MIB)
            file.write(b"spoilt!")
        for _ in range(2):
            self.ctl("load", "big@1", expect=6)
        self.ctl("status")


if __name__ == "__main__":
    unittest.main()
