"""Clients, programs and state of other versions: it works, or it is said which side is older."""
import re
import struct
import subprocess
import unittest

import frames
import harness
from harness import DAEMON, ROOT, Case, as_user, environment, smoke, wait_for

HEADER = (ROOT / "proto/abi/handle_frame.h").read_text()
OLDEST = int(re.search(r"kFrameAbiMin = (\d+);", HEADER).group(1))
NEWEST = int(re.search(r"kFrameAbi = (\d+);", HEADER).group(1))


class Frames(Case):
    """Raw clients that speak other ranges than this daemon."""

    def greet(self, **arguments):
        with frames.RawClient(self.daemon.handles_socket) as client:
            client.send(frames.hello(**arguments))
            kind, _, frame, fds = client.receive()
            if kind == frames.HELLO_REPLY:
                self.assertEqual(len(fds), 1)
                return struct.unpack_from("=I", frame, frames.HEADER.size)[0]
            code, = struct.unpack_from("=I", frame, frames.HEADER.size)
            with self.assertRaises(frames.Closed):
                client.receive()
            return code, frames.error_text(frame)

    @smoke
    def test_every_range_is_answered(self):
        for low, high in ((OLDEST, OLDEST), (OLDEST - 1, OLDEST), (OLDEST, NEWEST),
                          (NEWEST, NEWEST + 1), (0, 4000000000)):
            self.assertEqual(self.greet(abi_min=low, abi_max=high), min(high, NEWEST), (low, high))
        code, text = self.greet(abi_min=NEWEST + 1, abi_max=NEWEST + 2)
        self.assertEqual(code, 12)  # UNIMPLEMENTED
        self.assertIn(f"this client speaks {NEWEST + 1} to {NEWEST + 2}, this daemon speaks "
                      f"{OLDEST} to {NEWEST} (update modelhostd)", text)
        code, text = self.greet(abi_min=0, abi_max=OLDEST - 1)
        self.assertEqual(code, 12)
        self.assertIn("update libmodelhost", text)
        self.assertEqual(self.greet(abi_min=3, abi_max=2)[0], 3)  # No range: malformed.

    def test_a_frame_of_a_later_protocol_ends_that_connection_alone(self):
        self.serve("planner", 1)
        client = self.client()
        client.ok("acquire", ref="planner")
        with frames.RawClient(self.daemon.handles_socket) as later:
            later.greet()
            later.send(frames.header(77, 0, 9))
            with self.assertRaises(frames.Closed):
                while True:
                    kind, _, frame, _ = later.receive()
                    self.assertEqual(kind, frames.ERROR)
                    self.assertRegex(frames.error_text(frame), "77")
        with frames.RawClient(self.daemon.handles_socket) as longer:
            # A Hello that has grown: lengths are exact.
            payload = struct.pack("=IIQQ", 1, 1, 0, 0)
            longer.send(frames.header(frames.HELLO, len(payload), 1) + payload)
            kind, _, frame, _ = longer.receive()
            self.assertEqual(kind, frames.ERROR, frame)
        self.assertEqual(client.ok("acquire", ref="planner", key="b")["version"], 1)


class State(Case):
    """What a newer daemon left behind."""

    start_daemon = False

    def newer(self, path):
        text = re.sub(r'"schema": ?1\b', '"schema": 2', path.read_text(), count=1)
        self.assertIn('"schema": 2', text)
        path.write_text(text)
        return text

    def test_labels_of_a_newer_schema_stop_the_start_and_are_left_alone(self):
        self.daemon = self.new_daemon()
        self.serve("planner", 1)
        labels = self.daemon.state / "labels.json"
        good = labels.read_text()
        self.daemon.stop()
        newer = self.newer(labels)
        done = subprocess.run(self.daemon.command(), capture_output=True, text=True, timeout=60,
                              env=environment(), check=False, **as_user(DAEMON))
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, r"error: .*labels\.json: schema 2, this build reads 1: a newer "
                                      r"modelhostd wrote it \(run that one again")
        self.assertEqual(labels.read_text(), newer)
        # The way back that the message names.
        labels.write_text(good)
        self.daemon.start()
        self.assertEqual(self.json("label", "ls")["items"][0]["version"], 1)

    def test_a_newer_record_of_verified_files_costs_a_read_and_no_more(self):
        self.daemon = self.new_daemon()
        self.serve("planner", 1)
        record = self.daemon.state / "verified.json"
        wait_for("the record", record.exists)
        self.daemon.stop()
        self.newer(record)
        self.daemon.start()
        wait_for("ready", lambda: self.version_row("planner", 1)["state"] == "READY")

    def test_a_manifest_of_a_newer_schema_makes_that_version_invalid_alone(self):
        self.daemon = self.new_daemon()
        self.serve("planner", 1)
        self.publish("planner", 2)
        self.daemon.stop()
        folder = self.daemon.store / "models/planner/versions/2"
        folder.chmod(0o755)
        manifest = folder / "manifest.json"
        manifest.chmod(0o644)
        self.newer(manifest)
        manifest.chmod(0o444)
        folder.chmod(0o555)
        self.daemon.start()
        row = [row for row in self.json("versions", "planner", "--all")["items"]
               if row["name"] == "2" or row["version"] == 2][0]
        self.assertEqual(row["state"], "INVALID")
        self.assertIn("schema: is 2, this build reads 1", row["reason"])
        self.assertEqual(self.version_row("planner", 1)["state"], "READY")
        refused = self.ctl("swap", "planner", "--version", "2", expect=None)
        self.assertNotEqual(refused.code, 0)

    def ctl(self, *arguments, expect=harness.EXIT_OK, **options):
        if expect is not None:
            return super().ctl(*arguments, expect=expect, **options)
        return self.daemon.ctl(*arguments, **options)


class Versions(Case):
    def test_version_names_both_sides(self):
        both = self.json("version")
        for side in ("modelctl", "modelhostd"):
            self.assertRegex(both[side], r"^\d+\.\d+\.\d+")


if __name__ == "__main__":
    unittest.main()
