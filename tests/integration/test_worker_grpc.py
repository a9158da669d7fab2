"""Workers in any language: grpcio and the standard library, descriptors by ticket."""
import json
import shutil
import subprocess
import unittest

import models
from harness import (CLIENT, DEADLINE_S, OPERATOR, ROOT, STRANGER, Case, as_user,
                     end_with_us, environment, footprint, many, needs_root, smoke, wait_for)
import harness

NOT_FOUND, DENIED, PRECONDITION, DEADLINE, INVALID, CANCELLED, UNAVAILABLE = 5, 7, 9, 4, 3, 1, 14
EXAMPLE = ROOT / "client/examples/grpc_worker.py"
MIB = 1 << 20


def generate(folder):
    """The modules that a worker needs, made as the guide says."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["protoc", "-I", str(ROOT / "proto"), f"--python_out={folder}",
                    f"--grpc_out={folder}",
                    f"--plugin=protoc-gen-grpc={shutil.which('grpc_python_plugin')}",
                    "modelhost/v1/types.proto", "modelhost/v1/worker.proto"], check=True)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


class PeerProcess:
    """A grpc_peer.py process; every call is one command to it."""

    def __init__(self, case, user=CLIENT):
        self.process = subprocess.Popen(
            ["/usr/bin/python3", "-B", str(harness.PROGRAMS.scripts / "grpc_peer.py"),
             str(case.daemon.runtime)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment(PYTHONPATH=f"{case.generated}:{case.examples}"), cwd="/",
            preexec_fn=end_with_us, **as_user(user))

    @property
    def pid(self):
        return self.process.pid

    def call(self, verb, **arguments):
        self.process.stdin.write(json.dumps({"do": verb, **arguments}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"a peer died with {self.process.wait()}")
        return json.loads(line)

    def ok(self, verb, **arguments):
        answer = self.call(verb, **arguments)
        if not answer["ok"]:
            raise AssertionError(f"{verb} {arguments}: {answer}")
        return answer["result"]

    def kill(self):
        self.process.kill()
        self.close()

    def close(self):
        if not self.process.stdin.closed:
            try:
                self.process.stdin.close()
            except BrokenPipeError:
                pass
        try:
            self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class GrpcCase(Case):
    def setUp(self):
        super().setUp()
        self.generated = generate(self.folder / "generated")
        self.examples = self.folder / "examples"
        self.examples.mkdir(mode=0o755)
        self.examples.chmod(0o755)
        shutil.copy2(EXAMPLE, self.examples)
        (self.examples / EXAMPLE.name).chmod(0o755)

    def peer(self, user=CLIENT):
        peer = PeerProcess(self, user)
        self.addCleanup(peer.close)
        return peer

    def refused(self, code, answer):
        self.assertFalse(answer["ok"], answer)
        self.assertEqual(answer["code"], code, answer)
        return answer["message"]


class Worker(GrpcCase):
    @smoke
    def test_a_worker_acquires_maps_reads_and_its_lease_ends_with_its_stream(self):
        self.serve("planner", 1)
        peer = self.peer()
        opened = peer.ok("open")
        self.assertEqual(opened["handlesSocket"], str(self.daemon.handles_socket))
        self.assertEqual(peer.ok("map", name="m")["tensors"], 4)
        self.assertEqual(peer.ok("seeds", name="m"), [1])
        self.assertIn("read-only", peer.ok("write", name="m"))
        lease, = self.json("leases")["items"]
        self.assertEqual((lease["model"], lease["version"], lease["pid"]),
                         ("planner", 1, peer.pid))
        client, = [row for row in self.json("clients")["items"] if row["pid"] == peer.pid]
        self.assertEqual(client["transport"], "grpc")
        peer.ok("close")
        self.wait_leases(0)
        self.assertEqual(peer.ok("seeds", name="m"), [1])  # What is mapped stays.

    def test_the_example_follows_swaps(self):
        self.serve("planner", 1)
        self.publish("planner", 2)
        process = subprocess.Popen(
            ["/usr/bin/python3", "-B", str(self.examples / EXAMPLE.name), "--follow",
             "--runtime-dir", str(self.daemon.runtime), "--tensor", "layer.0.weight", "planner"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/",
            env=environment(PYTHONPATH=str(self.generated)), preexec_fn=end_with_us,
            **as_user(CLIENT))
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        values = lambda seed: [(seed << 32) + i for i in range(4)]
        self.assertEqual(process.stdout.readline(), "planner@1 generation 1: 4 tensors\n")
        self.assertEqual(process.stdout.readline(), f"  layer.0.weight I64 [8192]: {values(1)}\n")
        for generation, version in enumerate((2, 1, 2), 2):
            self.ctl("swap", "planner", "--version", version)
            self.assertEqual(process.stdout.readline(),
                             f"planner@{version} generation {generation}: 4 tensors\n")
            self.assertEqual(process.stdout.readline(),
                             f"  layer.0.weight I64 [8192]: {values(version)}\n")
            wait_for("the old lease to go", lambda: [
                row["version"] for row in self.json("leases")["items"]] == [version])
        # An operator takes its lease: it asks for another, and goes on following.
        lease, = self.json("leases")["items"]
        self.ctl("evict", lease["id"], "--yes")
        self.assertEqual(process.stdout.readline(), "planner@2 generation 4: 4 tensors\n")
        process.stdout.readline()
        self.wait_leases(1)
        self.ctl("swap", "planner", "--version", 1)
        self.assertEqual(process.stdout.readline(), "planner@1 generation 5: 4 tensors\n")
        process.stdout.readline()
        self.daemon.stop()
        self.assertRegex(process.stdout.readline(), "what is mapped stays good")
        process.wait(DEADLINE_S)
        self.assertIn("error: UNAVAILABLE", process.stderr.read())

    def test_the_example_tells_components_apart(self):
        folder = self.folder / "pair"
        for name, value in (("text", 3), ("vision", 5)):
            (folder / name).mkdir(parents=True)
            header = models.safetensors_header([("shared", "U8", [4], 4)])
            (folder / name / "model.safetensors").write_bytes(header + bytes([value]) * 4)
        self.serve("pair", 1, folder=folder)
        done = subprocess.run(
            ["/usr/bin/python3", "-B", str(self.examples / EXAMPLE.name), "--runtime-dir", str(self.daemon.runtime), "pair"],
            capture_output=True, text=True, cwd="/", check=False, timeout=DEADLINE_S,
            env=environment(PYTHONPATH=str(self.generated)), **as_user(CLIENT))
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(done.stdout.splitlines()[0], "pair@1 generation 1: 2 tensors")
        self.assertRegex(done.stdout, r"(?m)^  text\S*/shared U8 \[4\]: \[3, 3, 3, 3\]$")
        self.assertRegex(done.stdout, r"(?m)^  vision\S*/shared U8 \[4\]: \[5, 5, 5, 5\]$")

    def test_sidecar_files_come_by_the_same_ticket(self):
        self.serve("planner", 1)
        peer = self.peer()
        peer.ok("open")
        grant = peer.ok("acquire")
        text = peer.ok("fetch", ticket=grant["ticket"], lease=grant["lease"], path="tokenizer.json",
                       version=1)
        self.assertEqual(json.loads(text)["seed"], 1)

    def test_sealed_regions_are_checked_and_mapped(self):
        folder = models.simple_model(self.folder / "src", 3)
        self.give(folder)
        self.ctl("publish", folder, "--model", "planner", "--version", 3, "--residency", "sealed")
        self.ctl("swap", "planner", "--version", 3)
        peer = self.peer()
        peer.ok("open")
        peer.ok("map", name="m")
        self.assertEqual(peer.ok("seeds", name="m"), [3])
        self.assertEqual(self.json("leases")["items"][0]["transport"], "host_memfd")

    def test_resolve_says_what_a_reference_names(self):
        self.serve("planner", 1)
        self.publish("planner", 2)
        peer = self.peer()
        found = peer.ok("resolve", ref="planner")
        self.assertEqual((found["version"], found["label"], found["generation"], found["phase"]),
                         ("1", "stable", "1", "READY"))
        self.assertEqual(peer.ok("resolve", ref="planner@2")["phase"], "STAGED")
        self.assertIn("planner", self.refused(NOT_FOUND, peer.call("resolve", ref="plannr")))
        self.refused(PRECONDITION, peer.call("index", ref="planner@2"))

    def test_an_index_of_100000_tensors_comes_in_pages(self):
        count = many(20_000, 100_000)
        folder = self.folder / "big"
        models.write_safetensors(folder / "model.safetensors", 1, tensors=count, tensor_bytes=8)
        self.serve("planner", 1, folder=folder)
        peer = self.peer()
        index = peer.ok("index", ref="planner")
        self.assertEqual(index["tensors"], count)
        self.assertTrue(index["ordered"])
        self.assertGreater(index["pages"], 2)
        self.assertLess(index["biggest"], MIB)
        self.assertEqual(peer.ok("index", ref="planner", page_tensors=1000)["pages"],
                         count // 1000)
        peer.ok("open")
        self.assertEqual(peer.ok("map", name="m")["tensors"], count)

    def test_a_worker_may_wait_for_a_version(self):
        self.serve("planner", 1)
        peer = self.peer()
        peer.ok("open")
        self.refused(DEADLINE, peer.call("acquire", ref="planner@2", timeout=0.05))
        self.publish("planner", 2)
        self.assertIn("modelctl load",
                      self.refused(DEADLINE, peer.call("acquire", ref="planner@2", timeout=0.05)))
        self.ctl("load", "planner@2")
        self.assertEqual(peer.ok("acquire", ref="planner@2")["version"], 2)

    def test_a_version_on_its_way_out_is_told_and_an_eviction_too(self):
        self.serve("planner", 1)
        self.publish("planner", 2)
        peer = self.peer()
        peer.ok("open")
        lease = peer.ok("acquire")["lease"]
        self.ctl("swap", "planner", "--version", 2)
        self.assertEqual(peer.ok("event")["generationChanged"],
                         {"model": "planner", "label": "stable", "version": "2", "generation": "2"})
        self.ctl("unload", "planner@1", "--drain-timeout", "50ms", "--on-deadline", "release")
        self.assertEqual(peer.ok("event")["draining"]["lease"], str(lease))
        self.ctl("evict", lease, "--yes")
        self.assertEqual(peer.ok("event")["evicted"]["lease"], str(lease))


class BadUse(GrpcCase):
    def setUp(self):
        super().setUp()
        self.serve("planner", 1)

    @smoke
    def test_a_ticket_is_good_once_and_while_its_stream_lives(self):
        peer = self.peer()
        peer.ok("open")
        grant = peer.ok("acquire")
        wrong = f"{int(grant['ticket'], 16) ^ 1:032x}"
        self.assertIn("ticket", self.refused(DENIED, peer.call("redeem", ticket=wrong)))
        redeemed = peer.ok("redeem", ticket=grant["ticket"])
        self.assertEqual(redeemed["regions"], 1)
        self.refused(DENIED, peer.call("redeem", ticket=grant["ticket"]))
        released = peer.ok("acquire")
        peer.ok("release", lease=released["lease"])
        self.refused(DENIED, peer.call("redeem", ticket=released["ticket"]))
        self.refused(NOT_FOUND, peer.call("release", lease=released["lease"]))
        late = peer.ok("acquire")
        peer.ok("close")
        self.wait_leases(0)
        self.refused(DENIED, peer.call("redeem", ticket=late["ticket"]))
        self.assertIn("reason=ticket", self.daemon.log.read_text())

    @needs_root
    def test_a_ticket_of_another_user_is_none(self):
        peer, thief = self.peer(), self.peer(OPERATOR)
        peer.ok("open")
        grant = peer.ok("acquire")
        self.refused(DENIED, thief.call("redeem", ticket=grant["ticket"]))
        peer.ok("redeem", ticket=grant["ticket"])  # It was not used up either.

    @needs_root
    def test_a_stranger_gets_nothing(self):
        peer = self.peer(STRANGER)
        self.assertIn("may not read", self.refused(DENIED, peer.call("open")))
        self.refused(DENIED, peer.call("resolve", ref="planner"))
        self.refused(DENIED, peer.call("index", ref="planner"))

    def test_a_killed_worker_holds_nothing(self):
        peer = self.peer()
        peer.ok("open")
        peer.ok("map", name="m")
        self.wait_leases(1)
        peer.kill()
        self.wait_leases(0)

    def test_a_connection_that_goes_takes_its_leases_along(self):
        peer = self.peer()
        peer.ok("open")
        peer.ok("acquire")
        peer.ok("open", key="b")
        peer.ok("acquire", key="b")
        self.wait_leases(2)
        peer.ok("cut")
        self.wait_leases(1)
        peer.ok("acquire", key="b")

    def test_a_worker_survives_the_daemon_and_declares_its_lease_again(self):
        peer = self.peer()
        peer.ok("open")
        grant = peer.ok("acquire")
        peer.ok("map", name="m")
        self.daemon.kill()
        self.refused(UNAVAILABLE, peer.call("event"))
        self.assertEqual(peer.ok("seeds", name="m"), [1])
        self.daemon.start()
        peer.ok("open", key="again")
        again = peer.ok("redeclare", key="again", model="planner", version=1,
                        digest=grant["digest"], label="stable")
        self.assertEqual((again["version"], again["ticket"]), (1, ""))
        lease, = self.json("leases")["items"]
        self.assertEqual(lease["label"], "stable")
        # An old ticket is nothing to the new daemon.
        self.refused(DENIED, peer.call("redeem", ticket=grant["ticket"]))

    def test_a_daemon_that_stops_says_so_and_ends_the_stream(self):
        peer = self.peer()
        peer.ok("open")
        peer.ok("acquire")
        self.daemon.stop()
        self.assertEqual(peer.ok("event"), {"closing": {}})
        self.assertIn("stopping", self.refused(UNAVAILABLE, peer.call("event")))

    def test_1000_acquires_over_one_stream(self):
        peer = self.peer()
        peer.ok("open")
        fds = peer.ok("churn", times=10)["fds"]
        before = footprint(self.daemon.process.pid)
        self.assertEqual(peer.ok("churn", times=1000)["fds"], fds)
        self.wait_leases(1010)
        after = footprint(self.daemon.process.pid)
        self.assertLess(after["rss"] - before["rss"], 16 * MIB)
        self.assertLess(after["fds"] - before["fds"], 8)
        peer.ok("close")
        self.wait_leases(0)

    def test_who_does_not_read_is_not_read_any_more_and_ended(self):
        self.publish("planner", 2)
        before = footprint(self.daemon.process.pid)
        deaf = self.peer()
        deaf.ok("deaf", requests=100_000)
        other = self.peer()
        other.ok("open")
        self.wait_leases(1)
        unsent = -1

        def settled():
            nonlocal unsent
            unsent, last = deaf.ok("unsent"), unsent
            return unsent == last

        wait_for("its requests to stay unread", settled, 3 * DEADLINE_S)
        self.assertGreater(unsent, 0)
        for version in (2, 1) * 5:
            self.ctl("swap", "planner", "--version", version)
        other.ok("acquire")
        self.assertLess(footprint(self.daemon.process.pid)["rss"] - before["rss"], 32 * MIB)
        # An answer of which no byte is taken for 20 s ends the stream, and its leases.
        wait_for("the leases of the deaf one to end",
                 lambda: len(self.json("leases")["items"]) == 1, 3 * DEADLINE_S)
        self.assertNotIn(deaf.ok("deaf_end"), ("OK", "(goes on)"))
        other.ok("acquire")


if __name__ == "__main__":
    unittest.main()
