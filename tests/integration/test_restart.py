"""A restart that reads nothing: weights and indexes in systemd's fd store, clients that come back."""
import os
import resource
import threading

import fdstore
import models
from harness import AS_ROOT, DAEMON, Case, smoke, wait_for

TENSOR_BYTES = 8 << 20
WEIGHTS = 4 * TENSOR_BYTES
PARKED = 4  # Weights, two sidecars, the index.
# What a start reads besides: libraries, manifests, /proc.
LITTLE = 4 << 20

CONFIG = """[[models]]
name = "planner"
residency = "{residency}"
required = true
keep_previous = "10m"
"""


class Restart(Case):
    start_daemon = False
    residency = "sealed"

    def setUp(self):
        super().setUp()
        self.daemon = self.kept_daemon()

    def kept_daemon(self, **options):
        folder = self.folder / "d"
        folder.mkdir()
        folder.chmod(0o755)
        daemon = fdstore.KeptDaemon(folder, config=CONFIG.format(residency=self.residency),
                                    **options)
        self.addCleanup(daemon.close)
        self.addCleanup(self._finish, daemon)
        daemon.start(wait_ready=False)
        wait_for("the daemon to answer", lambda: daemon.ctl("status").code == 0)
        return daemon

    def serve_weights(self, version, tensor_bytes=TENSOR_BYTES):
        self.serve("planner", version, tensors=4, tensor_bytes=tensor_bytes)

    def restart_status(self):
        return self.json("status")["restart"]

    def last_load(self, version=None):
        name = "planner" if version is None else f"planner@{version}"
        return self.json("describe", name)["version"]["lastLoad"]

    def inode_of(self, client, key="a"):
        return client.ok("inode", name="layer.0.weight", key=key)["inode"]

    def restart(self, how):
        if how == "kill":
            self.daemon.kill()
        else:
            self.assertEqual(self.daemon.stop(), 0)
        self.daemon.start()


class WithoutReading(Restart):
    @smoke
    def test_ready_with_no_weight_byte_read_and_the_same_memory(self):
        self.serve_weights(1)
        client = self.client()
        client.ok("acquire", ref="planner")
        inode = self.inode_of(client)
        self.assertEqual(self.restart_status()["parked"], PARKED)
        for number, how in enumerate(["stop", "kill", "kill"], 1):
            with self.subTest(how=how, number=number):
                epoch = self.json("status")["epoch"]
                self.restart(how)
                io = self.daemon.io()  # At READY.
                self.assertLess(io["rchar"], LITTLE, io)
                # Not 0: on a busy machine pages of the program itself come from the disk.
                self.assertLess(io["read_bytes"], WEIGHTS // 2, io)
                self.assertEqual(self.last_load()["source"], "restore")
                self.assertEqual(self.last_load()["diskBytes"], 0)
                self.assertEqual(self.json("status")["epoch"], epoch + 1)
                restart = self.restart_status()
                self.assertEqual((restart["received"], restart["restoredVersions"],
                                  restart["rereadVersions"], restart["failedVersions"],
                                  restart["problem"]), (PARKED, 1, 0, 0, ""))
                self.wait_leases(1)
                other = self.client()
                other.ok("acquire", ref="planner")
                self.assertEqual(self.inode_of(other), inode)
                self.assertEqual(other.ok("seeds")["seeds"], [1])
                other.close()
                self.assertEqual(client.ok("seeds")["seeds"], [1])
        wait_for("the client to see the last epoch",
                 lambda: client.ok("state")["epoch"] == self.json("status")["epoch"])

    def test_without_the_store_the_same_start_reads_them(self):
        # Else the figures above would prove nothing.
        self.serve_weights(1)
        self.daemon.stop()
        self.daemon.keeper.forget()
        self.daemon.start()
        self.assertGreater(self.daemon.io()["rchar"], WEIGHTS)
        self.assertNotEqual(self.last_load()["source"], "restore")

    def test_clients_read_throughout_and_follow_the_next_epoch(self):
        self.serve_weights(1)
        client = self.client()
        client.ok("acquire", ref="planner")
        end = threading.Event()
        seen = []

        def read():
            while not end.is_set():
                seen.append(client.call("seeds"))

        reader = threading.Thread(target=read)
        reader.start()
        try:
            for _ in range(3):
                self.restart("kill")
        finally:
            end.set()
            reader.join()
        self.assertGreater(len(seen), 2)
        self.assertEqual([answer for answer in seen if answer.get("seeds") != [1]], [])
        self.assertEqual(client.ok("superseded")["superseded"], False)
        self.wait_leases(1)
        # The page of the dead epoch says nothing any more; the new one does.
        self.serve_weights(2)
        wait_for("the move to be seen", lambda: client.ok("superseded")["superseded"])

    def test_a_declared_lease_keeps_its_version_and_its_label(self):
        self.serve_weights(1)
        client = self.client()
        client.ok("acquire", ref="planner")
        self.serve_weights(2)
        self.restart("kill")
        self.wait_leases(1)
        lease = self.json("leases")["items"][0]
        self.assertEqual((lease["version"], lease["label"]), (1, "stable"))
        self.assertEqual(self.version_row("planner", 1)["state"], "READY")
        self.assertEqual(self.last_load(1)["source"], "restore")

    def test_a_store_that_cannot_be_read_yet_loses_nothing(self):
        self.serve_weights(1)
        folder = self.daemon.store / "models"
        self.daemon.kill()
        folder.chmod(0)
        try:
            self.daemon.start(wait_ready=False)
            wait_for("the daemon to say so", lambda: (
                lambda done: done.code == 0 and done.json()["storeError"])(
                    self.daemon.ctl("-o", "json", "status")))
        finally:
            folder.chmod(0o700)
        self.ctl("rescan")
        wait_for("it to be loaded", lambda: self.version_row("planner", 1)["state"] == "READY")
        self.assertEqual(self.last_load()["source"], "restore")
        self.assertEqual(self.restart_status()["restoredVersions"], 1)

    def test_memory_is_booked_and_locked_as_before(self):
        self.serve_weights(1)
        before = self.json("status")["budgets"]
        locked = self.version_row("planner", 1)["lockedBytes"]
        self.restart("kill")
        self.assertEqual(self.json("status")["budgets"], before)
        self.assertEqual(self.version_row("planner", 1)["lockedBytes"], locked)

    def test_what_is_unloaded_leaves_the_store(self):
        self.serve_weights(1)
        self.publish("planner", 2, tensors=1, tensor_bytes=TENSOR_BYTES)
        self.ctl("load", "planner@2")
        self.assertEqual(len(self.daemon.keeper.names()), 2 * PARKED)
        self.ctl("unload", "planner@2")
        wait_for("it to leave", lambda: len(self.daemon.keeper.names()) == PARKED)
        self.restart("kill")
        self.assertEqual(self.version_row("planner", 2)["state"], "STAGED")

    def test_metrics_tell_of_it(self):
        self.daemon.stop()
        self.daemon.metrics = "127.0.0.1:0"
        self.daemon.start(wait_ready=False)
        wait_for("an answer", lambda: self.daemon.ctl("status").code == 0)
        self.serve_weights(1)
        self.restart("kill")
        import urllib.request
        address = self.json("status")["metricsAddress"]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as page:
            text = page.read().decode()
        self.assertIn(f"modelhost_fdstore_fds {PARKED}", text)
        self.assertIn('modelhost_restores_total{outcome="success"} 1', text)
        self.assertRegex(text, r'modelhost_model_load_duration_seconds_count\{[^}]*source="restore"')


class WithSocketUnits(Restart):
    def kept_daemon(self, **options):
        return super().kept_daemon(sockets=True, **options)

    def test_sockets_and_memory_come_together_and_who_asks_meanwhile_waits(self):
        self.serve_weights(1)
        self.daemon.kill()
        asking = self.daemon.ctl_start("--timeout", "60s", "-o", "json", "status")
        late = self.client(connect=False)
        late.begin("connect", deadline_ms=60000)
        self.daemon.start()
        self.assertEqual(asking.communicate(timeout=60)[1], "")
        self.assertTrue(late.answer()["ok"])
        self.assertEqual(self.last_load()["source"], "restore")
        self.assertEqual(late.ok("acquire", ref="planner")["version"], 1)
        self.assertEqual(late.ok("seeds")["seeds"], [1])


class FileBacked(Restart):
    residency = "pinned"

    @smoke
    def test_it_is_pinned_again_from_the_page_cache(self):
        self.serve_weights(1, 1 << 20)  # Few enough to be locked by a plain user.
        client = self.client()
        client.ok("acquire", ref="planner")
        inode = self.inode_of(client)
        least = []  # Of what the disk was asked for: the program's own pages may be among it.
        for how in ("stop", "kill", "kill"):
            self.restart(how)
            io = self.daemon.io()
            least.append(io["read_bytes"])
            self.assertLess(io["rchar"], LITTLE, io)  # And none copied either.
            load = self.last_load()
            self.assertEqual((load["source"], load["restoredIndex"]), ("warm", True))
            row = self.version_row("planner", 1)
            self.assertEqual(row["tier"], "pinned")
            other = self.client()
            other.ok("acquire", ref="planner")
            self.assertEqual(self.inode_of(other), inode)
            other.close()
            self.assertEqual(client.ok("seeds")["seeds"], [1])
        self.assertLess(min(least), 1 << 20, least)


class SomethingIsWrong(Restart):
    """All of it is loaded from disk then, and the log says why."""

    def setUp(self):
        super().setUp()
        self.serve_weights(1)
        self.keeper = self.daemon.keeper
        self.names = self.keeper.names()
        self.assertEqual(len(self.names), PARKED)

    def expect_loaded(self, why):
        self.daemon.start()
        self.assertIn(why, self.daemon.log.read_text())
        self.assertIn(why, self.restart_status()["problem"])
        load = self.last_load()
        self.assertNotEqual(load["source"], "restore")
        self.assertEqual(load["diskBytes"], self.version_row("planner", 1)["hostBytes"])
        client = self.client()
        client.ok("acquire", ref="planner")
        self.assertEqual(client.ok("seeds")["seeds"], [1])
        # And it is whole again for the next one.
        self.restart("kill")
        self.assertEqual(self.last_load()["source"], "restore")

    def weights(self):
        return next(name for name in self.names
                    if os.fstat(dict(self.keeper.stored)[name]).st_size > WEIGHTS)

    def test_memory_of_another_size(self):
        self.daemon.kill()
        self.keeper.replace(self.weights(), fdstore.memory(4096))
        self.expect_loaded(": is inode")

    def test_memory_that_can_be_written(self):
        self.daemon.kill()
        nbytes = os.fstat(dict(self.keeper.stored)[self.names[0]]).st_size
        fd = fdstore.memory(nbytes, seals=False)
        record = self.daemon.state / "parked.json"
        record.write_text(record.read_text().replace(
            f'"inode": {self.keeper.inode(self.names[0])},', f'"inode": {os.fstat(fd).st_ino},'))
        self.keeper.replace(self.names[0], fd)
        self.expect_loaded(f"{self.names[0]}: ")

    def test_swapped_names(self):
        self.daemon.kill()
        self.keeper.swap(self.names[0], self.names[1])
        self.expect_loaded("the record says")

    def test_a_torn_record(self):
        self.daemon.kill()
        record = self.daemon.state / "parked.json"
        os.truncate(record, record.stat().st_size // 2)
        self.expect_loaded("parked.json")

    def test_no_record(self):
        self.daemon.kill()
        (self.daemon.state / "parked.json").unlink()
        self.expect_loaded("parked.json")

    def test_a_descriptor_that_is_no_memory(self):
        self.daemon.kill()
        self.keeper.replace(self.names[0], os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        self.expect_loaded(f"{self.names[0]}: ")

    def test_another_version_under_the_same_number(self):
        self.daemon.kill()
        versions = self.daemon.store / "models" / "planner" / "versions"
        os.chmod(versions / "1", 0o755)
        for path in (versions / "1").iterdir():
            path.unlink()
        (versions / "1").rmdir()
        (self.daemon.state / "labels.json").unlink()
        models.simple_model(versions / "1", 9, tensors=4, tensor_bytes=TENSOR_BYTES)
        for path in [versions / "1", *(versions / "1").iterdir()]:
            path.chmod(0o555 if path.is_dir() else 0o444)
            if AS_ROOT:
                os.chown(path, DAEMON, DAEMON)
        self.daemon.start(wait_ready=False)
        wait_for("an answer", lambda: self.daemon.ctl("status").code == 0)
        self.ctl("swap", "planner", "--version", "1")
        client = self.client()
        client.ok("acquire", ref="planner")
        self.assertEqual(client.ok("seeds")["seeds"], [9])


    def test_sealed_memory_with_other_bytes_that_the_record_vouches_for(self):
        # Whoever can write the record can write the files: this is about mistakes, not enemies.
        name = self.weights()
        inode, nbytes = self.keeper.inode(name), os.fstat(dict(self.keeper.stored)[name]).st_size
        self.daemon.kill()
        fd = fdstore.memory(nbytes, fill=b"x")
        record = self.daemon.state / "parked.json"
        record.write_text(record.read_text().replace(
            f'"inode": {inode},', f'"inode": {os.fstat(fd).st_ino},'))
        self.keeper.replace(name, fd)
        self.daemon.start()
        self.assertIn("of the memory that the fd store kept", self.restart_status()["problem"])
        client = self.client()
        client.ok("acquire", ref="planner")
        self.assertEqual(client.ok("seeds")["seeds"], [1])


class Junk(Restart):
    def test_a_thousand_foreign_descriptors_spoil_nothing_and_leave_the_store(self):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard < 12288:
            self.skipTest("needs 12288 descriptors")
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        self.serve_weights(1)
        self.daemon.kill()
        for number in range(1000):
            self.daemon.keeper.put(f"junk-{number % 7}", fdstore.memory(1))
        self.daemon.start()
        self.assertEqual(self.last_load()["source"], "restore")
        self.assertEqual(self.restart_status()["foreign"], 1000)
        wait_for("them to leave", lambda: len(self.daemon.keeper.names()) == PARKED)
        open_fds = len(os.listdir(f"/proc/{self.daemon.process.pid}/fd"))
        self.assertLess(open_fds, 200)


class FullStore(Restart):
    def kept_daemon(self, **options):
        return super().kept_daemon(env={"FDSTORE": "1"}, **options)

    def test_weights_come_first_and_a_load_never_fails_for_it(self):
        self.serve_weights(1)
        self.assertEqual(len(self.daemon.keeper.names()), 1)
        self.assertTrue(any("room for 1 descriptors" in text
                            for text in self.last_load()["warnings"]))
        self.restart("kill")
        self.assertLess(self.daemon.io()["rchar"], LITTLE)
        self.assertGreater(self.last_load()["restoredBytes"], WEIGHTS)


class Crashes(Restart):
    """SIGKILL at every message about the store: no start finds again what killed the last."""

    def test_a_start_killed_at_any_step_is_followed_by_a_good_one(self):
        self.serve_weights(1)
        keeper = self.daemon.keeper
        self.restart("kill")
        steps = keeper.count
        self.assertEqual(steps, 2 * PARKED)  # Each is taken out, and put in again.
        for step in range(1, steps + 1):
            with self.subTest(step=step):
                self.daemon.kill()
                daemon = self.daemon

                def end(count, wanted=step):
                    if count == wanted:
                        daemon.process.kill()

                keeper.on_message = end
                daemon.start(wait_ready=False)
                daemon.process.wait(30)
                daemon.told_to_end = True
                keeper.on_message = None
                daemon.start()
                self.assertEqual(self.version_row("planner", 1)["state"], "READY")
                client = self.client()
                client.ok("acquire", ref="planner")
                self.assertEqual(client.ok("seeds")["seeds"], [1])
                client.close()
                wait_for("the store to be whole", lambda: len(keeper.names()) == PARKED)
