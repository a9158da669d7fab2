"""kill -9 at every step: of the daemon, of modelctl, and of a client. How, crash_case.py says."""
import json
import os
import pathlib
import signal

import harness
import models
from crash_case import (CASES_RUN, DEADLINE_MS, LISTED, PASSED, REQUIRED, TAKEN, CrashCase, chosen,
                        seed_of)
from harness import (AS_ROOT, DAEMON, EXIT_INTEGRITY, EXIT_NOT_FOUND, EXIT_OK, PROGRAMS, Case,
                     Client, wait_for)


class CrashOfTheDaemon(CrashCase):
    def test_publish(self):
        source = self.give(models.simple_model(self.folder / "third", 3))
        publish = ("publish", source, "--model", "planner", "--version", 3)

        def check(daemon, client):
            self.do(daemon, *publish, "--label", "stable")
            client.ok("acquire", ref="planner", key="new")
            self.assertEqual(client.ok("seeds", key="new")["seeds"], [3])

        self.kill_at_each_step(lambda daemon: daemon.ctl_start(*publish), check)

    def test_repair(self):
        source = self.give(models.simple_model(self.folder / "second", 2))
        publish = ("publish", source, "--model", "planner", "--version", 2)

        def prepare(daemon):
            weights = daemon.store / "models/planner/versions/2/model.safetensors"
            weights.chmod(0o644)
            with open(weights, "r+b") as file:
                file.seek(-8, os.SEEK_END)
                file.write(b"\xff" * 8)
            weights.chmod(0o444)
            self.do(daemon, "verify", "planner@2", expect=EXIT_INTEGRITY)

        def check(daemon, client):
            # The bad version or the good one, and never none.
            self.assertEqual([path.name for path in sorted(
                (daemon.store / "models/planner/versions").iterdir())], ["1", "2"])
            daemon.ctl("verify", "planner@2")
            self.do(daemon, *publish, "--label", "stable")
            client.ok("acquire", ref="planner", key="new")
            self.assertEqual(client.ok("seeds", key="new")["seeds"], [2])

        self.kill_at_each_step(lambda daemon: daemon.ctl_start(*publish), check, prepare,
                               only=("repair.", "publish."))

    def test_load(self):
        self.kill_at_each_step(lambda daemon: daemon.ctl_start("load", "planner@2"),
                               lambda daemon, client: self.do(daemon, "load", "planner@2"))

    def test_swap_of_a_set(self):
        swap = ("swap", "planner", "--version", 2, "--set", "detector=2")

        def check(daemon, client):
            self.assertIn(self.labels(daemon), ({"planner": 1, "detector": 1},
                                                {"planner": 2, "detector": 2}), "all or nothing")
            self.do(daemon, *swap)
            for model in ("planner", "detector"):
                client.ok("acquire", ref=model, key="new")
                self.assertEqual(client.ok("seeds", key="new")["seeds"], [seed_of(model, 2)])

        self.kill_at_each_step(lambda daemon: daemon.ctl_start(*swap), check,
                               only=("flip.", "file.", "load.ready"))

    def test_unload(self):
        self.kill_at_each_step(lambda daemon: daemon.ctl_start("unload", "planner@2"),
                               lambda daemon, client: self.do(daemon, "unload", "planner@2"),
                               lambda daemon: self.do(daemon, "load", "planner@2"))

    def test_delete(self):
        delete = ("delete", "planner@2", "--yes")

        def check(daemon, client):
            there = (daemon.store / "models/planner/versions/2").exists()
            self.do(daemon, *delete, expect=EXIT_OK if there else EXIT_NOT_FOUND)
            self.assertFalse((daemon.store / "models/planner/versions/2").exists())

        self.kill_at_each_step(lambda daemon: daemon.ctl_start(*delete), check,
                               only=("delete.", "journal."))

    def test_a_grant(self):
        waiting = {}

        def action(daemon):
            client = waiting[daemon] = self.client(daemon=daemon)
            client.begin("acquire", ref="planner", wait=True, deadline_ms=DEADLINE_MS)
            if not (daemon.folder / "fault").exists():
                self.assertTrue(client.answer()["ok"])

        def check(daemon, client):
            # It asked the dead daemon, and is answered by the next.
            answer = waiting[daemon].answer()
            self.assertTrue(answer["ok"], answer)
            self.assertEqual(waiting[daemon].ok("seeds")["seeds"], [1])
            waiting[daemon].close()

        self.kill_at_each_step(action, check, only=("grant.",))

    def test_an_acquire_that_does_not_wait(self):
        CASES_RUN.add("test_an_acquire_that_does_not_wait")

        def trial(daemon, step):
            daemon.faulty().start()
            client = self.client(daemon=daemon)
            daemon.arm(step)
            client.begin("acquire", ref="planner")
            daemon.wait_killed()
            versions = daemon.store / "models"
            mode = versions.stat().st_mode
            versions.chmod(0)
            try:
                daemon.product().start(wait_ready=False)
                # Of the dead daemon: it may have been sent again to the one that cannot know yet.
                self.check_refusal(client.answer())
                wait_for("it to be told why", lambda: "still reading its store" in (
                    self.check_refusal(client.call("acquire", ref="planner"))))
                # One that waits is not refused.
                client.begin("acquire", ref="planner", wait=True, deadline_ms=DEADLINE_MS)
            finally:
                versions.chmod(mode)
            self.do(daemon, "rescan")
            answer = client.answer()
            self.assertTrue(answer["ok"], answer)
            client.ok("acquire", ref="planner", key="again")
            self.assertEqual(client.ok("seeds", key="again")["seeds"], [1])
            self.wait_leases(2, daemon=daemon)
            client.close()

        self.at_once(["grant.noted"], trial)

    def check_refusal(self, answer):
        """Of a kind that a client may try again; its text."""
        self.assertFalse(answer["ok"], answer)
        self.assertIn(answer["status"], ("UNAVAILABLE", "FAILED_PRECONDITION"), answer)
        return answer["message"]

    def test_gc(self):
        self.config = REQUIRED.replace("required = true", "required = true\nkeep_on_disk = 1")

        def prepare(daemon):
            for model in ("planner", "detector"):
                source = models.simple_model(daemon.folder / f"{model}-3", seed_of(model, 3))
                self.do(daemon, "publish", self.give(source), "--model", model, "--version", 3)
            orphan = daemon.state / "manifests/planner/9.json"
            orphan.parent.mkdir(parents=True, exist_ok=True)
            orphan.write_text("{}")
            if AS_ROOT:
                for path in (orphan, orphan.parent, orphan.parent.parent):
                    os.chown(path, DAEMON, DAEMON)

        def check(daemon, client):
            self.do(daemon, "gc")
            for model in ("planner", "detector"):
                self.assertEqual([path.name for path in sorted(
                    (daemon.store / "models" / model / "versions").iterdir())], ["1", "3"])
            self.assertFalse((daemon.state / "manifests/planner/9.json").exists())
            self.assertEqual(self.rows(daemon, "gc", "--dry-run")["items"], [])
            self.do(daemon, "swap", "planner", "--version", 3)
            client.ok("acquire", ref="planner", key="new")
            self.assertEqual(client.ok("seeds", key="new")["seeds"], [3])

        self.kill_at_each_step(lambda daemon: daemon.ctl_start("gc"), check, prepare,
                               only=("gc.", "delete."))

    def test_start(self):
        CASES_RUN.add("test_start")
        recorded = self.copy("recorded").faulty()
        recorded.record()
        recorded.start()
        passed = recorded.points.read_text().split()
        recorded.stop()
        PASSED.update(passed)
        if not harness.FULL:  # Loads at the start are those of test_load.
            passed = [name for name in passed if not name.startswith("load.")]
            TAKEN.difference_update(passed)  # What the start writes is written nowhere else.

        def trial(daemon, step):
            daemon.faulty(MODELHOST_FAULT_POINT=step)
            epochs = []
            for _ in range(2):  # And again, in the middle of picking up the pieces.
                daemon.start(wait_ready=False)
                daemon.wait_killed()
                epochs.append(json.loads((daemon.state / "labels.json").read_text())["epoch"])
            daemon.product().start()
            self.assertEqual(self.labels(daemon), {"planner": 1, "detector": 1})
            self.check_nothing_is_left(daemon)
            epochs.append(self.rows(daemon, "status")["epoch"])
            self.assertEqual(epochs, sorted(epochs))
            self.assertGreater(epochs[-1], epochs[-2])

        self.at_once(chosen(passed, often=()), trial)


class CrashOfModelctl(CrashCase):
    def test_publish_at_its_own_steps(self):
        source = models.simple_model(self.folder / "third", 3)
        for number in range(70):  # More than go into one frame.
            (source / f"note-{number}.txt").write_text(f"note {number}\n")
        self.give(source)
        publish = ("publish", source, "--model", "planner", "--version", 3)
        steps = [name for name in LISTED if name.startswith("ctl.")]

        def trial(daemon, step):
            daemon.start()
            process = daemon.ctl_start(*publish, program=PROGRAMS.faulty_ctl,
                                       env={"MODELHOST_FAULT_POINT": step})
            self.end_of(process)
            self.assertEqual(process.returncode, -signal.SIGKILL, "it did not pass the step")
            self.assertTrue(daemon.alive)
            # Nobody is left who could send the rest. With all of it there, it goes on alone.
            done = daemon.ctl(*publish)
            if done.code != EXIT_OK:  # It met the one that goes on.
                wait_for("the publish to be possible",
                         lambda: daemon.ctl(*publish).code == EXIT_OK)
            self.assertEqual(daemon.ctl("swap", "planner", "--version", 3).code, EXIT_OK)
            client = self.client(daemon=daemon)
            client.ok("acquire", ref="planner")
            self.assertEqual(client.ok("seeds")["seeds"], [3])
            client.close()
            for row in self.rows(daemon, "ops", "ls")["items"]:
                if row["state"] in ("running", "queued"):  # Waits for a minute.
                    self.assertEqual(row["operationKind"], "publish", row)
                    daemon.ctl("ops", "cancel", row["id"])
            wait_for("nothing in incoming",
                     lambda: not list((daemon.store / "incoming").iterdir()))

        self.at_once(steps, trial)


class CrashOfAClient(CrashCase):
    def test_at_its_own_steps(self):
        self.daemon = self.copy("clients")
        self.daemon.start()
        stays = self.client()
        stays.ok("acquire", ref="planner")
        steps = [name for name in LISTED if name.startswith("client.")]
        for step in steps:
            with self.subTest(step):
                client = Client(self.daemon, connect=False, library=PROGRAMS.faulty_library,
                                more_env={"MODELHOST_FAULT_POINT": step})
                self.addCleanup(client.close)
                with self.assertRaisesRegex(AssertionError, "died with -9"):
                    client.ok("connect")
                    client.ok("acquire", ref="planner")
                    client.ok("release")
                    client.ok("state")
                self.wait_leases(1)
                wait_for("one client", lambda: len(self.json("clients")["items"]) == 1)
                self.assertEqual(stays.ok("seeds")["seeds"], [1])
        self.assertEqual(self.daemon.ctl("swap", "planner", "--version", 2).code, EXIT_OK)
        stays.ok("release")
        self.assertEqual(self.daemon.ctl("unload", "planner@1").code, EXIT_OK)


class Products(Case):
    start_daemon = False

    def test_what_ships_has_no_armed_step(self):
        word = b"MODELHOST_FAULT_POINT"
        for path in (PROGRAMS.daemon, PROGRAMS.ctl, PROGRAMS.library,
                     str(pathlib.Path(PROGRAMS.daemon).with_name("modelhost-indexer"))):
            self.assertNotIn(word, pathlib.Path(path).read_bytes(), path)
        for path in (PROGRAMS.faulty_daemon, PROGRAMS.faulty_ctl, PROGRAMS.faulty_library):
            self.assertIn(word, pathlib.Path(path).read_bytes(), path)
        self.assertGreater(len(LISTED), 30)
