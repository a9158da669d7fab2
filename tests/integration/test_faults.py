"""Bad luck: two daemons, dead daemons, hostile peers, wrong configurations."""
import os
import signal
import socket
import struct
import subprocess
import time
import unittest

import frames
from harness import (AS_ROOT, CLIENT, EXIT_UNREACHABLE, PROGRAMS, Case, as_user, environment, smoke,
                     wait_for)
import harness


class TwoDaemons(Case):
    def test_the_second_daemon_says_who_has_the_directory(self):
        second = harness.Daemon(self.daemon.folder, wait=False)
        done = subprocess.run(second.command(), capture_output=True, text=True, timeout=30,
                              env=environment(), check=False, **as_user(harness.DAEMON))
        self.assertNotEqual(done.returncode, 0)
        self.assertIn(str(self.daemon.process.pid), done.stderr)
        self.assertIn(str(self.daemon.runtime), done.stderr)
        self.ctl("status")

    @smoke
    def test_a_socket_left_by_a_killed_daemon_is_taken_over(self):
        self.daemon.kill()
        self.assertTrue(self.daemon.handles_socket.exists())
        self.ctl("status", expect=EXIT_UNREACHABLE)
        self.daemon.start()
        self.ctl("status")

    def test_sigterm_ends_it_whatever_clients_do(self):
        self.serve("planner", 1)
        client = self.client()
        client.ok("acquire", ref="planner")
        silent = frames.RawClient(self.daemon.handles_socket)
        with silent:
            self.assertEqual(self.daemon.stop(), 0)
        self.assertFalse(self.daemon.handles_socket.exists())
        self.assertEqual(client.ok("seeds")["seeds"], [1])

    def test_sigterm_during_a_load_ends_it_too(self):
        self.publish("planner", 1, tensors=8, tensor_bytes=32 << 20)
        loading = self.daemon.ctl_start("load", "planner@1")
        wait_for("the load to begin", lambda: self.version_row("planner", 1)["state"] != "STAGED"
                 or loading.poll() is not None)
        started = time.monotonic()
        self.assertEqual(self.daemon.stop(), 0)
        self.assertLess(time.monotonic() - started, 10)
        loading.communicate(timeout=30)


class Reload(Case):
    """SIGHUP: [[models]] of the configuration is taken over, a bad file changes nothing."""

    daemon_options = {"config": '[[models]]\nname = "planner"\nresidency = "mapped"\n'}

    def configure(self, text):
        self.daemon.config_text = text
        self.daemon.command()  # Writes the file.

    def residency_of(self, version):
        self.publish("planner", version)
        self.ctl("load", f"planner@{version}")
        return self.version_row("planner", version)["residency"]

    @smoke
    def test_changed_models_hold_for_the_next_load(self):
        self.assertEqual(self.residency_of(1), "mapped")
        self.configure('[[models]]\nname = "planner"\nresidency = "sealed"\n')
        self.assertIn("RELOADING=1", self.daemon.reload())
        self.assertEqual(self.residency_of(2), "sealed")
        wait_for("the log to say it",
                 lambda: "event=reload changed=models" in self.daemon.log.read_text())

    def test_a_bad_file_keeps_what_was(self):
        self.configure('[[models]]\nname = "planner"\nresidence = "sealed"\n')
        self.assertIn("RELOADING=1", self.daemon.reload())
        wait_for("the log to say it", lambda: "nothing was changed" in self.daemon.log.read_text())
        self.assertIn("models.residence", self.daemon.log.read_text())
        self.assertEqual(self.residency_of(1), "mapped")

    def test_many_at_once_end_with_the_last_file(self):
        for kind in ["warm", "sealed"] * 10 + ["pinned"]:
            self.configure(f'[[models]]\nname = "planner"\nresidency = "{kind}"\n')
            self.daemon.process.send_signal(signal.SIGHUP)
        self.publish("planner", 1)
        wait_for("the last file to hold",
                 lambda: self.json("ls")["items"][0]["residency"] == "pinned")


class ReloadBeforeReady(Case):
    start_daemon = False

    def test_a_bad_file_is_not_a_start(self):
        self.daemon = harness.Daemon(self.folder, wait=False,
                                     config='[[models]]\nname = "planner"\nrequired = true\n')
        self.addCleanup(self._finish, self.daemon)
        self.daemon.start(wait_ready=False)
        wait_for("the daemon to answer", lambda: self.daemon.ctl("status").code == 0)
        self.daemon.config_text = "[memory\n"
        self.daemon.command()
        self.daemon.process.send_signal(signal.SIGHUP)

        wait_for("the log to say it", lambda: "nothing was changed" in self.daemon.log.read_text())
        self.ctl("status")  # A READY=1 would have been sent before this is answered.
        self.assertNotIn("READY=1", self.daemon.notify.messages)
        self.assertNotIn("RELOADING=1", self.daemon.notify.messages)
        # While the required model is awaited, systemd is asked for time.
        self.assertIn("EXTEND_TIMEOUT_USEC=120000000", self.daemon.notify.messages)
        self.serve("planner", 1)
        self.daemon.wait_ready()


class WrongConfiguration(Case):
    start_daemon = False

    def check(self, text, *words):
        daemon = harness.Daemon(self.folder, wait=False, config=text)
        for extra in ([], ["--check-config"]):
            done = subprocess.run([*daemon.command(), *extra], capture_output=True, text=True,
                                  timeout=30, env=environment(), check=False,
                                  **as_user(harness.DAEMON))
            self.assertNotEqual(done.returncode, 0, done.stderr)
            for word in words:
                self.assertIn(word, done.stderr)

    def test_an_unknown_key_is_named_with_file_and_line(self):
        self.check("[memory]\nhost_bugdet = \"1GiB\"\n", "modelhostd.toml", ":2", "host_bugdet")

    def test_a_wrong_value_is_named(self):
        self.check("[memory]\nhost_budget = \"lots\"\n", "modelhostd.toml", "host_budget")

    def test_text_that_is_no_toml(self):
        self.check("[memory\n", "modelhostd.toml", ":1")

    def test_a_good_file_passes_the_check(self):
        daemon = harness.Daemon(self.folder, wait=False, config="[load]\nthreads = 2\n")
        done = subprocess.run([*daemon.command(), "--check-config"], capture_output=True, text=True,
                              timeout=30, env=environment(), check=False,
                              **as_user(harness.DAEMON))
        self.assertEqual(done.returncode, 0, done.stderr)


class HostileClients(Case):
    """Raw frames, as somebody would send them who means harm or has a bug."""

    def setUp(self):
        super().setUp()
        self.serve("planner", 1)

    def raw(self, uid=CLIENT):
        # The kernel notes who connects: do it as a client.
        if not AS_ROOT:
            return frames.RawClient(self.daemon.handles_socket)
        os.setegid(uid)
        groups = os.getgroups()
        os.setgroups([harness.READERS])
        os.seteuid(uid)
        try:
            return frames.RawClient(self.daemon.handles_socket)
        finally:
            os.seteuid(0)
            os.setgroups(groups)
            os.setegid(0)

    def still_serves(self):
        self.assertTrue(self.daemon.alive)
        client = self.client()
        self.assertEqual(client.ok("acquire", ref="planner")["version"], 1)
        self.assertEqual(client.ok("seeds")["seeds"], [1])
        client.close()

    def ends(self, client):
        """The daemon answers with an Error or nothing, and then ends the connection."""
        with self.assertRaises(frames.Closed):
            for _ in range(4):
                kind, _, _, _ = client.receive()
                self.assertEqual(kind, frames.ERROR)

    @smoke
    def test_a_well_behaved_raw_client_is_served(self):
        with self.raw() as client:
            client.greet()
            lease, version = client.grant("planner")
            self.assertEqual(version, 1)
            self.wait_leases(1)
            client.send(frames.release(lease))
            self.wait_leases(0)

    def test_silence_costs_nothing(self):
        silent = [self.raw() for _ in range(50)]
        self.still_serves()
        for client in silent:
            client.close()
        self.still_serves()

    def test_a_connection_that_never_greets_is_ended(self):
        client = self.raw()
        client.socket.settimeout(60)
        with client:
            self.ends(client)

    def test_broken_frames_end_the_connection_and_nothing_else(self):
        good = frames.acquire([frames.ref("planner")])
        header = frames.HEADER.pack(frames.MAGIC, frames.ACQUIRE, len(good), 2, 0)
        cases = {
            "half a header": good[:7],
            "half a frame": good[:100],
            "a frame longer than it says": good + b"\0" * 8,
            "a wrong magic": b"XX" + good[2:],
            "an unknown type": frames.HEADER.pack(frames.MAGIC, 99, 16, 2, 0),
            "a type that only the daemon sends": frames.HEADER.pack(frames.MAGIC, frames.GRANTED, 16,
                                                                    2, 0),
            "a length of 4 GiB": frames.HEADER.pack(frames.MAGIC, frames.ACQUIRE, 0xFFFFFFFF, 2, 0) +
                                 good[16:],
            "descriptors promised, none sent": frames.HEADER.pack(
                frames.MAGIC, frames.ACQUIRE, len(good), 2, 64) + good[16:],
            "a huge count": frames.acquire([frames.ref("planner")], count=0xFFFFFFFF),
            "a count of none": frames.acquire([]),
            "a name without an end": header + struct.pack("=IIQ", 0, 1, 0) + b"a" * 144 +
                                     struct.pack("=Q32s", 0, b""),
            "a second greeting": frames.hello(),
            "nothing but noise": os.urandom(4000),
            "the longest frame": os.urandom(16384),
            "longer than the longest": b"\0" * 100000,
        }
        for what, frame in cases.items():
            with self.subTest(what), self.raw() as client:
                client.greet()
                try:
                    client.send(frame)
                except frames.Closed:
                    continue
                # It may be told why; it never gets what it was not given.
                self.ends(client)
        self.still_serves()

    def test_descriptors_that_nobody_asked_for_are_closed(self):
        pid = self.daemon.process.pid
        self.still_serves()

        def descriptors():
            return len(os.listdir(f"/proc/{pid}/fd"))

        before = wait_for("connections to end", lambda: not self.json("clients")["items"] and
                          descriptors())
        for _ in range(20):
            with self.raw() as client:
                client.greet()
                reads = []
                for _ in range(30):
                    read, write = os.pipe()
                    os.close(write)
                    reads.append(read)
                try:
                    client.send(frames.header(frames.SUBSCRIBE, 0, 2, len(reads)), reads)
                    client.receive()
                except frames.Closed:
                    pass
                for read in reads:
                    os.close(read)
        self.still_serves()
        wait_for("the descriptors to be closed", lambda: descriptors() <= before + 2)

    def test_a_wrong_abi_is_refused_in_words(self):
        with self.raw() as client:
            client.send(frames.hello(abi_min=7, abi_max=9))
            kind, _, frame, _ = client.receive()
            self.assertEqual(kind, frames.ERROR)
            self.assertRegex(frames.error_text(frame), r"\d")

    def test_leases_of_others_cannot_be_ended(self):
        with self.raw() as holder, self.raw() as thief:
            holder.greet()
            lease, _ = holder.grant("planner")
            thief.greet()
            thief.send(frames.release(lease))
            thief.send(frames.subscribe())
            try:
                thief.receive()
            except frames.Closed:
                pass
            self.wait_leases(1)

    def test_a_reader_that_never_reads_does_not_stop_a_swap(self):
        slow = []
        for _ in range(4):
            client = self.raw()
            client.greet()
            client.send(frames.subscribe())
            slow.append(client)
        self.publish("planner", 2)
        for version in [2, 1] * 10:
            self.ctl("swap", "planner", "--version", version)
        self.still_serves()
        for client in slow:
            client.close()

    def test_garbage_on_the_control_socket(self):
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000),
                     b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 1000):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
                peer.connect(str(self.daemon.runtime / "control.sock"))
                try:
                    peer.sendall(data)
                except (BrokenPipeError, ConnectionResetError):
                    pass
        self.ctl("status")
        self.still_serves()

    def test_many_connections_from_one_process_do_not_lock_others_out(self):
        crowd = []
        try:
            for _ in range(200):
                client = self.raw()
                try:
                    client.greet()
                except (frames.Closed, AssertionError):
                    client.close()
                    break
                crowd.append(client)
            self.ctl("status")
        finally:
            for client in crowd:
                client.close()
        self.still_serves()


if __name__ == "__main__":
    unittest.main()
