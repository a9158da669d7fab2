"""Labels: moved all at once, durably, and never to something that does not work."""
import os
import threading
import time
import unittest

import models
from harness import (AS_ROOT, DAEMON, EXIT_CONFLICT, EXIT_INTEGRITY, EXIT_NOT_FOUND, EXIT_OK,
                     EXIT_OLD_SERVES, Case, smoke, wait_for)


class Swap(Case):
    daemon_options = {"config": '[[models]]\nname = "brief"\nkeep_previous = "200ms"\n'}

    def label(self, model, name="stable", **options):
        for row in self.json("label", "ls", **options)["items"]:
            if (row["model"], row["label"]) == (model, name):
                return row
        return None

    def break_version(self, model, version):
        path = self.daemon.store / f"models/{model}/versions/{version}/model.safetensors"
        path.chmod(0o644)
        with open(path, "r+b") as file:
            file.seek(-16, os.SEEK_END)
            file.write(b"\xff" * 8)
        path.chmod(0o444)

    @smoke
    def test_swap_and_rollback(self):
        self.serve("planner", 7)
        self.publish("planner", 8)
        result = self.ctl("swap", "planner", "--version", "8")
        self.assertRegex(result.out.splitlines()[-1],
                         r"^planner:stable 7 -> 8  generation 2  load [\d.]+ \w+  flip [\d.]+ \S+  "
                         r"draining \d+ lease")
        self.assertEqual(self.label("planner")["version"], 8)
        self.ctl("rollback", "planner")
        row = self.label("planner")
        self.assertEqual((row["version"], row["generation"]), (7, 3))

    def test_swap_to_where_it_is_is_success_and_changes_nothing(self):
        self.serve("planner", 7)
        result = self.ctl("swap", "planner", "--version", "7")
        self.assertIn("unchanged", result.out)
        self.assertEqual(self.label("planner")["generation"], 1)

    def test_a_failed_swap_changes_nothing(self):
        self.serve("planner", 7)
        self.publish("planner", 8)
        self.break_version("planner", 8)
        client = self.client()
        client.ok("acquire", ref="planner")
        before = self.label("planner")
        result = self.ctl("swap", "planner", "--version", "8", expect=EXIT_OLD_SERVES)
        self.assertRegex(result.err, r"7")
        self.assertEqual(self.label("planner"), before)
        self.assertEqual(client.ok("superseded")["superseded"], 0)
        self.assertEqual(client.ok("acquire", ref="planner", key="b")["version"], 7)
        self.assertEqual(self.version_row("planner", 7)["state"], "READY")
        self.assertEqual(self.version_row("planner", 8)["state"], "QUARANTINED")

    def test_a_set_moves_together_or_not_at_all(self):
        self.serve("planner", 1)
        self.serve("detector", 1)
        for model in ("planner", "detector"):
            self.publish(model, 2)
            self.publish(model, 3)
        client = self.client()
        self.assertEqual(client.ok("follow_set", refs=["planner", "detector"])["versions"], [1, 1])
        self.ctl("swap", "planner", "--version", "2", "--set", "detector=2")
        wait_for("the set to move", lambda: client.ok("adopt_set")["versions"] != [1, 1])
        self.assertEqual(client.ok("adopt_set")["versions"], [2, 2])
        self.break_version("detector", 3)
        self.ctl("swap", "planner", "--version", "3", "--set", "detector=3", expect=EXIT_OLD_SERVES)
        self.assertEqual([self.label(model)["version"] for model in ("planner", "detector")], [2, 2])
        self.assertEqual(client.ok("adopt_set")["versions"], [2, 2])

    def test_compare_and_swap(self):
        self.serve("planner", 1)
        self.publish("planner", 2)
        self.ctl("swap", "planner", "--version", "2", "--if-current", "5", expect=EXIT_CONFLICT)
        self.assertEqual(self.label("planner")["version"], 1)
        self.ctl("swap", "planner", "--version", "2", "--if-current", "1")
        self.assertEqual(self.label("planner")["version"], 2)

    def test_a_dry_run_prints_the_plan_and_changes_nothing(self):
        self.serve("planner", 1)
        self.publish("planner", 2)
        result = self.ctl("swap", "planner", "--version", "2", "--dry-run")
        self.assertIn("planner", result.out)
        self.assertEqual(self.label("planner")["version"], 1)
        self.assertEqual(self.version_row("planner", 2)["state"], "STAGED")

    def test_other_labels(self):
        self.serve("planner", 1)
        self.publish("planner", 2)
        self.ctl("swap", "planner", "--version", "2", "--label", "canary")
        client = self.client()
        self.assertEqual(client.ok("acquire", ref="planner:canary")["version"], 2)
        self.assertEqual(client.ok("acquire", ref="planner", key="b")["version"], 1)
        self.ctl("label", "rm", "planner:canary")
        self.assertIsNone(self.label("planner", "canary"))
        wait_for("the removal to be seen", lambda: client.ok("superseded")["superseded"] == 1)
        self.assertEqual(client.call("acquire", ref="planner:canary", key="c")["status"],
                         "NOT_FOUND")
        self.ctl("label", "set", "planner:canary", "2")
        self.assertEqual(self.label("planner", "canary")["version"], 2)
        self.publish("planner", 3)
        self.ctl("label", "set", "planner:canary", "3", expect=EXIT_CONFLICT)

    def test_labels_survive_a_kill(self):
        self.serve("planner", 1)
        self.publish("planner", 2)
        self.ctl("swap", "planner", "--version", "2")
        self.ctl("swap", "planner", "--version", "1", "--label", "canary")
        before = sorted((row["label"], row["version"], row["generation"], row["previous"])
                        for row in self.json("label", "ls")["items"])
        self.daemon.kill()
        self.daemon.start()
        after = sorted((row["label"], row["version"], row["generation"], row["previous"])
                       for row in self.json("label", "ls")["items"])
        self.assertEqual(after, before)
        client = self.client()
        self.assertEqual(client.ok("acquire", ref="planner", wait=True)["version"], 2)
        self.ctl("rollback", "planner")
        self.assertEqual(self.label("planner")["version"], 1)

    def test_a_node_adopts_at_a_moment_of_its_own(self):
        self.serve("planner", 1)
        self.publish("planner", 2)
        client = self.client()
        self.assertEqual(client.ok("follow", ref="planner")["version"], 1)
        self.ctl("swap", "planner", "--version", "2")
        wait_for("the new version", lambda: client.ok("adopt")["version"] == 2)
        self.assertEqual(client.ok("adopt")["seeds"], [2])
        self.wait_leases(1)

    def test_the_old_version_is_freed_after_its_last_lease(self):
        self.serve("brief", 1)
        self.publish("brief", 2)
        client = self.client()
        client.ok("acquire", ref="brief")
        result = self.ctl("swap", "brief", "--version", "2")
        self.assertRegex(result.out, r"draining 1 lease")
        wait_for("draining", lambda: self.version_row("brief", 1)["state"] == "DRAINING")
        self.assertEqual(client.ok("seeds")["seeds"], [1])
        self.assertEqual(client.ok("superseded")["superseded"], 1)
        client.ok("release")
        wait_for("freed", lambda: self.version_row("brief", 1)["state"] == "STAGED")

    def test_the_old_version_stays_for_keep_previous(self):
        self.serve("planner", 1)
        self.publish("planner", 2)
        self.ctl("swap", "planner", "--version", "2")
        self.assertEqual(self.version_row("planner", 1)["state"], "READY")
        result = self.json("rollback", "planner")
        self.assertLess(result["loadSeconds"], 0.2)

    def test_rollback_without_a_previous_version_is_refused(self):
        self.serve("planner", 1)
        result = self.daemon.ctl("rollback", "planner")
        self.assertIn(result.code, (EXIT_NOT_FOUND, EXIT_CONFLICT), str(result))

    def test_nothing_is_mixed_while_labels_move(self):
        self.serve("planner", 1, tensors=8, tensor_bytes=64 << 10)
        self.publish("planner", 2, tensors=8, tensor_bytes=64 << 10)
        self.ctl("load", "planner@2")
        clients = [self.client() for _ in range(6)]
        for client in clients:
            client.begin("read_loop", ref="planner", seconds=8)
        moves = 0
        done = threading.Event()
        answers = []

        def collect():
            for client in clients:
                answers.append(client.answer())
            done.set()

        collector = threading.Thread(target=collect)
        collector.start()
        while not done.is_set():
            result = self.daemon.ctl("swap", "planner", "--version", 2 if moves % 2 == 0 else 1)
            self.assertEqual(result.code, EXIT_OK, str(result))
            moves += 1
        collector.join()
        self.assertGreaterEqual(moves, 4)
        for answer in answers:
            self.assertTrue(answer["ok"], answer)
            self.assertEqual((answer["mixed"], answer["failed"]), (0, 0), answer)
            self.assertGreater(answer["reads"], 4)
        seen = set().union(*(answer["versions"] for answer in answers))
        self.assertEqual(seen, {"1", "2"})


class BesideLongLoads(Case):
    """More loads than the daemon does at once, each of a file that takes long to hash."""

    MODELS = [f"slow{i}" for i in range(6)]
    daemon_options = {"config": "".join(
        f'[[models]]\nname = "{name}"\nresidency = "mapped"\n' for name in MODELS)}

    def put(self, model, nbytes=4 << 30):
        # As an operator's rsync leaves it, without a manifest; a hole needs no disk.
        model_dir = self.daemon.store / "models" / model
        version = model_dir / "versions/1"
        version.mkdir(parents=True)
        with open(version / "model.safetensors", "wb") as out:
            out.write(models.safetensors_header([("w", "I64", [nbytes // 8], nbytes)]))
            out.truncate(out.tell() + nbytes)
        for path in [model_dir, *model_dir.rglob("*")]:
            path.chmod(0o700 if path.is_dir() else 0o400)
            if AS_ROOT:
                os.chown(path, DAEMON, DAEMON)

    def under_way(self):
        return [row for row in self.json("ops", "ls")["items"]
                if row["model"] in self.MODELS and row["state"] in ("queued", "running")]

    def test_a_rollback_and_a_stop_wait_for_none(self):
        self.serve("planner", 1)
        self.publish("planner", 2)
        self.ctl("swap", "planner", "--version", "2")
        for model in self.MODELS:
            self.put(model)
        self.ctl("rescan")
        for model in self.MODELS:
            self.ctl("swap", model, "--version", "1", "--no-wait")
        self.assertEqual(len(self.under_way()), len(self.MODELS))
        self.ctl("rollback", "planner")
        self.assertTrue(self.under_way(), "the rollback waited for the loads")
        started = time.monotonic()
        self.assertEqual(self.daemon.stop(), 0)
        self.assertLess(time.monotonic() - started, 5)


if __name__ == "__main__":
    unittest.main()
