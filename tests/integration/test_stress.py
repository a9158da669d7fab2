"""Many at once, many times over. Counts are small; MODELHOST_STRESS=full runs the real ones.

What took how long is printed and not tested: other programs run on the same machine. tests/bench has
the figures."""
import time
import unittest

import models
from harness import OPERATOR, Case, footprint, many, wait_for

MIB = 1 << 20
SLACK_BYTES = 8 * MIB  # What an allocator may keep.


class Footprint(Case):
    def rest(self):
        """The daemon's footprint once it has nothing to do."""
        wait_for("no clients", lambda: not self.json("clients")["items"])
        before, stable = None, 0
        end = time.monotonic() + 20
        while stable < 5 and time.monotonic() < end:
            now = footprint(self.daemon.process.pid)
            stable = stable + 1 if before is not None and now["fds"] == before["fds"] else 0
            before = now
            time.sleep(0.05)
        return before

    def assert_back(self, before, after, what):
        print(f"{what}: {before} -> {after}", end=" ", flush=True)
        self.assertLessEqual(after["anonymous"], before["anonymous"] + SLACK_BYTES, what)
        self.assertEqual(after["locked"], before["locked"], what)
        # gRPC's own threads, and its descriptors for them, come and go a few at a time.
        self.assertLessEqual(after["fds"], before["fds"] + 4, what)
        self.assertLessEqual(after["threads"], before["threads"] + 4, what)
        # A thread that comes and goes has a stack and an arena: four maps.
        self.assertLessEqual(after["maps"], before["maps"] + 4 * 4 + 8, what)


class MixedOperations(Footprint):
    def test_32_threads_see_typed_errors_only_and_the_books_are_right_after(self):
        names = ["m0", "m1", "m2"]
        for name in names:
            for version in range(1, 5):
                self.publish(name, version, seed=version, tensors=2, tensor_bytes=64 << 10)
            self.ctl("swap", name, "--version", "1")
        readers = [self.client() for _ in range(3)]
        seconds = many(5, 120)
        for reader, name in zip(readers, names):
            reader.begin("read_loop", ref=name, seconds=seconds)
        self.stress("mixed_operations", f"--models={','.join(names)}", "--versions=4",
                    f"--operations={many(60, 1000)}", user=OPERATOR, deadline_s=1800)
        for reader in readers:
            counts = reader.answer()
            self.assertEqual((counts["failed"], counts["mixed"]), (0, 0), counts)
            reader.close()
        self.check_books(names)

    def check_books(self, names):
        rpc = self.rpc()

        def at_rest():
            running = [o for o in rpc.call("ListOperations")["responses"][0]["operations"]
                       if o["state"] in ("QUEUED", "RUNNING")]
            status = rpc.call("GetStatus")["responses"][0]
            versions = [v for n in names for v in rpc.call("ListVersions", {"model": n})
                        ["responses"][0]["versions"]]
            busy = [v for v in versions if v["phase"] not in ("STAGED", "READY")]
            return (status, versions) if not running and not busy and \
                int(status.get("leases", 0)) == 0 else None

        status, versions = wait_for("all to come to rest", at_rest)
        self.assertEqual(int(status.get("invalidTransitions", 0)), 0)
        ready = {(v["model"], v["version"]): v for v in versions if v["phase"] == "READY"}
        regions = {}  # Versions of the same content share them.
        for model, version in ready:
            answer = rpc.call("GetVersion", {"model": model, "version": version})["responses"][0]
            regions.update({(r["sha256"], r["kind"]): int(r.get("bytes", 0)) for r in answer["regions"]})
        held = sum(regions.values())
        pools = {pool["name"]: int(pool.get("reservedBytes", 0)) for pool in status["pools"]}
        self.assertEqual(pools["host"], held, "booked is what is there")
        labelled = 0
        for name in names:
            for label in rpc.call("GetModel", {"model": name})["responses"][0]["labels"]:
                self.assertIn((name, label["version"]), ready, "a label names what is ready")
                labelled += 1
        self.assertEqual(labelled, len(names))
        # And it still works.
        for name in names:
            for version in ("1", "2"):
                self.ctl("swap", name, "--version", version)
                client = self.client()
                client.ok("acquire", ref=name)
                self.assertEqual(client.ok("seeds")["seeds"], [int(version)])
                client.close()


class Leaks(Footprint):
    # Every swap frees the old version, so every swap loads one.
    daemon_options = {"config": '[[models]]\nname = "a"\nkeep_previous = "0s"\n'
                                '[[models]]\nname = "b"\nkeep_previous = "0s"\nresidency = "sealed"\n'}

    def swap_all(self, swaps, readers):
        self.stress("set_readers", "--models=a,b", f"--swaps={swaps}", f"--readers={readers}",
                    "--idle-seconds=0", user=OPERATOR, deadline_s=1200)

    def test_swaps_that_load_and_free_leave_nothing_behind(self):
        for name in ("a", "b"):
            for version in (1, 2):
                folder = self.folder / f"{name}-{version}"
                models.write_paged(folder / "model.safetensors", version, pages=64)
                self.publish(name, version, folder=folder)
        self.ctl("swap", "a", "--version", "1", "--set", "b=1")
        self.swap_all(20, 2)  # What is made once is made now.
        before = self.rest()
        self.swap_all(many(100, 1000), 4)
        self.assert_back(before, self.rest(), "after swaps with readers")
        self.stress("client_churn", "--ref=a", f"--rounds={many(100, 1000)}", "--parallel=8")
        self.swap_all(many(20, 100), 2)
        self.assert_back(before, self.rest(), "after clients that came and went")


class Sets(Footprint):
    def test_64_readers_never_see_half_of_a_set(self):
        for name in ("a", "b"):
            for version in (1, 2):
                folder = self.folder / f"{name}-{version}"
                models.write_paged(folder / "model.safetensors", version, pages=16)
                self.publish(name, version, folder=folder)
                self.ctl("load", f"{name}@{version}")
        self.ctl("swap", "a", "--version", "1", "--set", "b=1")
        answer = self.stress("set_readers", "--models=a,b", f"--swaps={many(100, 1000)}",
                             "--readers=64", f"--hz={many(5, 20)}", f"--idle-seconds={many(1, 10)}",
                             user=OPERATOR, deadline_s=900)
        self.assertEqual(answer["bad"], 0, answer)
        self.assertGreater(answer["adopted"], 32)
        self.assertGreater(answer["reads"], 64)


class Churn(Footprint):
    def test_clients_that_are_killed_leave_no_lease_no_descriptor_and_no_memory(self):
        folder = models.simple_model(self.folder / "m", 1)
        self.serve("planner", 1, folder=folder)
        self.stress("client_churn", "--ref=planner", "--rounds=50", "--seed=7")
        before = self.rest()
        answer = self.stress("client_churn", "--ref=planner", f"--rounds={many(500, 10000)}",
                             deadline_s=1800)
        self.assertEqual(answer["killed"], answer["rounds"])
        self.wait_leases(0)
        self.assert_back(before, self.rest(), "after clients that were killed")
        client = self.client()
        client.ok("acquire", ref="planner")
        self.assertEqual(client.ok("seeds")["seeds"], [1])


class LeaseOfTheDead(Case):
    def test_it_ends_with_the_process(self):
        self.publish("big", 1, tensors=2, tensor_bytes=many(32, 512) * MIB)
        self.ctl("swap", "big", "--version", "1")
        answer = self.stress("lease_gone", "--ref=big", f"--rounds={many(10, 100)}")
        self.assertEqual(answer["rounds"], many(10, 100))


if __name__ == "__main__":
    unittest.main()
