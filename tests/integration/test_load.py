"""Loading: whole, verified, shared, within the budgets, and refusing what is wrong."""
import mmap
import os
import struct
import unittest

import frames
import models
from harness import (DAEMON, EXIT_INTEGRITY, EXIT_OK, EXIT_RESOURCES, EXIT_SUPERSEDED,
                     EXIT_CONFLICT, AS_ROOT, Case, smoke, wait_for)


def model_config(**keys):
    lines = ["[[models]]", 'name = "planner"']
    lines += [f'{key} = "{value}"' for key, value in keys.items()]
    return "\n".join(lines) + "\n"


class Load(Case):
    def stored(self, model, version, name="model.safetensors"):
        return self.daemon.store / "models" / model / "versions" / str(version) / name

    def damage(self, path, change):
        path.chmod(0o644)
        with open(path, "r+b") as file:
            change(file)
        path.chmod(0o444)

    def last_load(self, ref):
        return self.json("describe", ref)["version"]["lastLoad"]

    @smoke
    def test_a_load_says_where_its_time_went(self):
        self.publish("planner", 1)
        self.ctl("load", "planner@1")
        row = self.version_row("planner", 1)
        self.assertEqual((row["state"], row["health"]), ("READY", "OK"))
        self.assertEqual(row["tensorCount"], 4)
        load = self.last_load("planner@1")
        self.assertGreater(load["durationSeconds"], 0)
        self.assertTrue(load["phases"])

    def test_loading_twice_is_one_load(self):
        self.publish("planner", 1, tensors=8, tensor_bytes=8 << 20)
        both = [self.daemon.ctl_start("load", "planner@1") for _ in range(4)]
        for process in both:
            _, err = process.communicate(timeout=60)
            self.assertEqual(process.returncode, 0, err)
        done = wait_for("the log to have it", lambda: [
            line for line in self.daemon.log.read_text().splitlines()
            if "event=load model=planner version=1 outcome=" in line])
        self.assertEqual(len(done), 1, done)
        self.assertEqual(self.version_row("planner", 1)["state"], "READY")

    def test_two_versions_share_what_is_the_same(self):
        self.publish("planner", 1, folder=models.write_sharded(
            self.folder / "a", [1, 2], tensors=2, tensor_bytes=1 << 20))
        self.publish("planner", 2, folder=models.write_sharded(
            self.folder / "b", [1, 3], tensors=2, tensor_bytes=1 << 20))
        self.ctl("load", "planner@1")
        reserved = self.host_reserved()
        self.ctl("load", "planner@2")
        load = self.last_load("planner@2")
        shard = self.stored("planner", 2, "model-00002-of-00002.safetensors").stat().st_size
        self.assertGreaterEqual(load["sharedBytes"], 2 << 20)
        self.assertGreaterEqual(load["diskBytes"], shard)
        self.assertLess(load["diskBytes"], 2 * shard)
        self.assertLess(self.host_reserved() - reserved, 2 * shard)

    def host_reserved(self):
        return next(pool["reservedBytes"] for pool in self.json("status")["budgets"]
                    if pool["name"] == "host")

    def test_a_model_of_300_shards(self):
        self.publish("wide", 1, folder=models.write_sharded(
            self.folder / "wide", [1] * 300, tensors=1, tensor_bytes=4096))
        self.ctl("swap", "wide", "--version", "1", deadline_s=120)
        client = self.client()
        client.ok("acquire", ref="wide")
        answer = client.ok("seeds")
        self.assertEqual((answer["seeds"], answer["bytes"]), ([1], 300 * 4096))
        few = self.client(limits={"RLIMIT_NOFILE": 40})
        answer = few.call("acquire", ref="wide")
        if answer["ok"]:  # It maps and closes as it goes: then it must have read everything.
            self.assertEqual(few.ok("seeds")["bytes"], 300 * 4096)
        else:
            self.assertEqual(answer["status"], "RESOURCE_EXHAUSTED")
            self.assertRegex(answer["message"], "RLIMIT_NOFILE|descriptors")
            self.assertEqual(few.ok("state")["leases"], 0)

    def test_bad_files_are_refused_with_the_reason(self):
        header = models.safetensors_header([("a", "F32", [1024], 4096)])
        cases = {
            "cut in the data": header + b"\0" * 1000,
            "cut in the header": header[:20],
            "a byte too many": header + b"\0" * 4097,
            "a header of 2^60 bytes": struct.pack("<Q", 1 << 60) + b"{}",
            "no format at all": b"weights, honestly" * 100,
            "empty": b"",
            "GGUF with 2^60 tensors": b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0),
            "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\n"
                                    b"oid sha256:" + b"0" * 64 + b"\nsize 12345\n",
        }
        for number, (what, data) in enumerate(cases.items(), 1):
            with self.subTest(what):
                source = self.folder / f"bad{number}"
                source.mkdir()
                (source / "model.safetensors").write_bytes(data)
                self.give(source)
                published = self.daemon.ctl("publish", source, "--model", "bad", "--version", number)
                if published.code == EXIT_OK:  # Not looked into before the load: then the load says it.
                    result = self.ctl("load", f"bad@{number}", expect=EXIT_INTEGRITY)
                    self.assertIn("model.safetensors", result.err)
                    row = self.version_row("bad", number)
                    self.assertEqual(row["state"], "QUARANTINED")
                    self.assertTrue(row["reason"])
                else:
                    self.assertEqual(published.code, EXIT_INTEGRITY, str(published))
        self.publish("planner", 1)
        self.ctl("load", "planner@1")

    def test_one_flipped_bit_is_found(self):
        self.publish("planner", 1, tensors=4, tensor_bytes=4 << 20)

        def flip(file):
            file.seek(-12345678, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 4]))

        self.damage(self.stored("planner", 1), flip)
        result = self.ctl("load", "planner@1", expect=EXIT_INTEGRITY)
        self.assertIn("model.safetensors", result.err)
        self.assertEqual(self.version_row("planner", 1)["state"], "QUARANTINED")

    def test_a_missing_file_fails_the_load(self):
        self.publish("planner", 1, folder=models.write_sharded(self.folder / "s", [1, 2]))
        gone = self.stored("planner", 1, "model-00002-of-00002.safetensors")
        gone.parent.chmod(0o755)
        gone.unlink()
        result = self.daemon.ctl("load", "planner@1")
        self.assertNotEqual(result.code, 0)
        self.assertIn("model-00002-of-00002.safetensors", result.err)

    def test_unload_during_a_load_ends_it(self):
        self.publish("planner", 1, tensors=8, tensor_bytes=32 << 20)
        for _ in range(3):
            loading = self.daemon.ctl_start("load", "planner@1")
            wait_for("the load to begin", lambda: self.version_row("planner", 1)["state"] != "STAGED"
                     or loading.poll() is not None)
            unloaded = self.daemon.ctl("unload", "planner@1")
            _, err = loading.communicate(timeout=60)
            self.assertIn(loading.returncode, (EXIT_OK, EXIT_SUPERSEDED), err)
            self.assertIn(unloaded.code, (EXIT_OK, EXIT_CONFLICT), str(unloaded))
            wait_for("planner@1 to be gone",
                     lambda: self.version_row("planner", 1)["state"] == "STAGED")
        self.ctl("load", "planner@1")
        self.assertEqual(self.version_row("planner", 1)["state"], "READY")

    def test_unloading_what_is_in_use_waits_for_the_last_lease(self):
        self.publish("planner", 1)
        self.ctl("load", "planner@1")
        client = self.client()
        client.ok("acquire", ref="planner@1")
        unloading = self.daemon.ctl_start("unload", "planner@1")
        wait_for("draining", lambda: self.version_row("planner", 1)["state"] == "DRAINING")
        self.assertEqual(client.ok("seeds")["seeds"], [1])
        client.ok("release")
        _, err = unloading.communicate(timeout=60)
        self.assertEqual(unloading.returncode, 0, err)
        self.assertEqual(self.version_row("planner", 1)["state"], "STAGED")


class Residency(Case):
    start_daemon = False

    def residency(self, kind):
        self.daemon = self.new_daemon(name=kind, config=model_config(residency=kind))
        self.serve("planner", 1, folder=models.simple_model(self.folder / f"src-{kind}", 1))
        client = self.client()
        client.ok("acquire", ref="planner")
        self.assertEqual(client.ok("seeds")["seeds"], [1])
        return client, self.version_row("planner", 1)

    def test_mapped(self):
        _, row = self.residency("mapped")
        self.assertEqual((row["residency"], row["lockedBytes"]), ("mapped", 0))

    def test_warm(self):
        _, row = self.residency("warm")
        self.assertEqual((row["residency"], row["tier"].lower(), row["lockedBytes"]),
                         ("warm", "warm", 0))

    def test_pinned(self):
        _, row = self.residency("pinned")
        self.assertEqual((row["residency"], row["tier"].lower()), ("pinned", "pinned"))
        self.assertGreaterEqual(row["lockedBytes"], 4 * (64 << 10))

    @smoke
    def test_sealed_cannot_be_written_by_anybody(self):
        client, row = self.residency("sealed")
        self.assertEqual(row["residency"], "sealed")
        self.assertEqual(client.ok("seeds")["seeds"], [1])
        # The library closes what it has mapped: the descriptors come by the wire.
        with frames.RawClient(self.daemon.handles_socket) as raw:
            raw.greet()
            raw.grant("planner")
            sealed = [fd for fd in raw.fds if "memfd:" in os.readlink(f"/proc/self/fd/{fd}")]
            weights = [fd for fd in sealed if os.fstat(fd).st_size >= 4 * (64 << 10)]
            self.assertTrue(weights, "no descriptor of the weights came")
            for fd in sealed:
                self.refuses_to_be_written(fd)

    def refuses_to_be_written(self, fd):
        path = f"/proc/self/fd/{fd}"
        before = os.pread(fd, 64, 0)
        try:
            again = os.open(path, os.O_RDWR)  # As root, or the same user: the mode allows it.
        except OSError:
            return
        try:
            with self.assertRaises(OSError, msg=os.readlink(path)):
                mmap.mmap(again, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            with self.assertRaises(OSError, msg=os.readlink(path)):
                os.pwrite(again, b"hostile", 0)
            with self.assertRaises(OSError, msg=os.readlink(path)):
                os.ftruncate(again, 0)
        finally:
            os.close(again)
        self.assertEqual(os.pread(fd, 64, 0), before)


class Budgets(Case):
    start_daemon = False

    def test_required_memlock_refuses_with_numbers_and_the_fix(self):
        self.daemon = self.new_daemon(config='[memory]\nmemlock = "required"\n',
                                      limits={"RLIMIT_MEMLOCK": 1 << 20})
        self.publish("planner", 1, tensors=4, tensor_bytes=1 << 20)
        result = self.ctl("load", "planner@1", expect=EXIT_RESOURCES)
        self.assertRegex(result.err, r"(?i)memlock")
        self.assertRegex(result.err, r"\d")
        self.assertRegex(result.err, r"\(.*\)")
        self.assertNotEqual(self.version_row("planner", 1)["state"], "READY")

    def test_best_effort_memlock_goes_on_and_says_so(self):
        self.daemon = self.new_daemon(config='[memory]\nmemlock = "best_effort"\n',
                                      limits={"RLIMIT_MEMLOCK": 1 << 20})
        self.publish("planner", 1, tensors=4, tensor_bytes=1 << 20)
        self.ctl("load", "planner@1")
        row = self.version_row("planner", 1)
        self.assertEqual((row["state"], row["health"]), ("READY", "DEGRADED"), row)
        self.assertRegex(row["healthReason"], r"(?i)pin")
        load = self.json("describe", "planner@1")["version"]["lastLoad"]
        self.assertTrue(load["warnings"], load)

    def test_what_does_not_fit_is_refused_before_it_is_read(self):
        self.daemon = self.new_daemon(config='[memory]\nhost_budget = "6MiB"\n')
        self.publish("planner", 1, tensors=4, tensor_bytes=1 << 20)
        self.publish("planner", 2, tensors=4, tensor_bytes=1 << 20)
        self.ctl("swap", "planner", "--version", "1")
        result = self.ctl("load", "planner@2", expect=EXIT_RESOURCES)
        self.assertRegex(result.err, r"planner@1|planner", "it says who holds the room")
        self.assertEqual(self.version_row("planner", 1)["state"], "READY")
        self.assertEqual(self.version_row("planner", 2)["state"], "STAGED")


if __name__ == "__main__":
    unittest.main()
