"""kill -9 at every step: of the daemon, of modelctl, and of a client.

What the steps are, proto/handle/fault_point.h says; programs that are linked with
tests/faults/fault_point_armed.cc end themselves there. Each case first lets its action run through
and notes the steps that it passes, then repeats it from the same beginning once for each step, is
killed there, starts the daemon that ships on what was left, and looks whether all is well.
"""
import collections
import json
import os
import pathlib
import re
import signal
import subprocess

import models
from harness import (EXIT_INTEGRITY, EXIT_OK, PROGRAMS, ROOT, Case, Client, Daemon,
                     wait_for)
import harness

LISTED = re.findall(r'^    "([a-z]+\.[a-z_]+)",$',
                    (ROOT / "proto/handle/fault_point.h").read_text(), re.M)
PASSED = set()  # By the cases that have run.
CASES_RUN = set()


class Faulty(Daemon):
    """A daemon that may be told to end at a step."""

    def arm(self, point):
        self.program = PROGRAMS.faulty_daemon
        self.env = {"MODELHOST_FAULT_POINT": point}

    def record(self, file):
        self.program = PROGRAMS.faulty_daemon
        self.env = {"MODELHOST_FAULT_LIST": str(file)}

    def disarm(self):
        self.program, self.env = None, {}

    def wait_killed(self):
        try:
            code = self.process.wait(harness.DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not pass the step:\n{self.log_tail()}") from None
        self.told_to_end = True
        self.notify.close()
        if code != -signal.SIGKILL:
            raise AssertionError(f"modelhostd ended with {code}:\n{self.log_tail()}")


def seed_of(model, version):
    """No two versions share a file's bytes, so that sums of bytes are sums of bookings."""
    return version + (100 if model == "detector" else 0)


def point_list(folder):
    file = folder / "points"
    file.write_text("")
    file.chmod(0o666)
    return file


def occurrences(before, during):
    """NAME:NTH for the first and the last time that each step is passed in `during`."""
    seen = collections.Counter(before)
    numbers = {}
    for name in during:
        seen[name] += 1
        numbers.setdefault(name, []).append(seen[name])
    chosen = []
    for name, all_of_it in numbers.items():
        for number in sorted({all_of_it[0], all_of_it[-1]}):
            chosen.append(f"{name}:{number}")
    return chosen


class CrashCase(Case):
    start_daemon = False

    def setUp(self):
        super().setUp()
        self.template = self.make_template()

    def make_template(self):
        """planner 1 (stable) and 2, detector 1 (stable) and 2; the daemon stopped."""
        folder = self.folder / "template"
        folder.mkdir()
        folder.chmod(0o755)
        self.daemon = Faulty(folder, wait=False)
        self.addCleanup(self._finish, self.daemon)
        self.daemon.start()
        for model in ("planner", "detector"):
            for version in (1, 2):
                self.publish(model, version, seed=seed_of(model, version),
                             label="stable" if version == 1 else None)
        self.daemon.stop()
        return folder

    def copy(self, name):
        folder = self.folder / name
        subprocess.run(["cp", "-a", str(self.template), str(folder)], check=True)
        daemon = Faulty(folder, wait=False)
        self.addCleanup(self._finish, daemon)
        return daemon

    def kill_at_each_step(self, prepare, action, check):
        """`prepare(daemon)` before the steps that count; `action(daemon)` returns a process, or None
        when all its work is the daemon's; `check(daemon)` when the next daemon runs."""
        CASES_RUN.add(self.id().rsplit(".", 1)[-1])
        recorded = self.copy("recorded")
        points = point_list(recorded.folder)
        recorded.record(points)
        recorded.start()
        prepare(recorded)
        before = points.read_text().split()
        self.end_of(action(recorded), expect=EXIT_OK)
        during = points.read_text().split()[len(before):]
        recorded.stop()
        PASSED.update(before + during)
        steps = occurrences(before, during)
        self.assertTrue(steps)
        for step in steps:
            with self.subTest(step):
                self.crash_once(step, prepare, action, check)
        print(f"[{len(steps)} steps] ", end="", flush=True)

    def crash_once(self, step, prepare, action, check):
        daemon = self.copy(step.replace(":", "-"))
        daemon.arm(step)
        daemon.start()
        prepare(daemon)
        reader = self.client(daemon=daemon)
        # A step of the reader's own would count; what reads is there before, or after the crash.
        if "grant" not in step:
            reader.ok("acquire", ref="planner@1")
        process = action(daemon)
        daemon.wait_killed()
        self.end_of(process)
        if "grant" not in step:
            self.assertEqual(reader.ok("seeds")["seeds"], [1], "a reader that was attached")
        daemon.disarm()
        daemon.start()
        self.check_all_is_well(daemon)
        if "grant" not in step:
            self.assertEqual(reader.ok("seeds")["seeds"], [1], "after the restart")
        check(daemon)
        self.check_nothing_is_left(daemon)
        reader.close()
        self.assertEqual(daemon.stop(), 0)

    def end_of(self, process, expect=None):
        if process is None:
            return
        out, err = process.communicate(timeout=2 * harness.DEADLINE_S)
        if expect is not None:
            self.assertEqual(process.returncode, expect, out + err)

    def rows(self, daemon, *arguments):
        result = daemon.ctl("-o", "json", *arguments)
        self.assertEqual(result.code, EXIT_OK, str(result))
        return result.json()

    def label_of(self, daemon, model):
        for row in self.rows(daemon, "ls")["items"]:
            if row["name"] == model:
                return next(label["version"] for label in row["labels"]
                            if label["label"] == "stable")
        return self.fail(f"{model} has no label")

    def check_all_is_well(self, daemon):
        status = self.rows(daemon, "status")
        self.assertTrue(status["ready"], status)
        self.assertEqual(status["invalidTransitions"], 0)
        # Labels name what is there and loads; nobody gets a byte of another version.
        for model in ("planner", "detector"):
            version = self.label_of(daemon, model)
            client = self.client(daemon=daemon)
            got = client.ok("acquire", ref=model, wait=True, deadline_ms=20000)
            self.assertEqual(got["version"], version)
            self.assertEqual(client.ok("seeds")["seeds"], [seed_of(model, version)])
            client.close()
            for row in self.rows(daemon, "versions", model, "--all")["items"]:
                self.assertNotIn(row["state"], ("INVALID", "QUARANTINED"), row)
        # No operation of the dead daemon is taken for one that runs.
        for row in self.rows(daemon, "ops", "ls")["items"]:
            self.assertNotIn(row["state"], ("RUNNING", "QUEUED"), row)
        self.assertNotIn("journal", "\n".join(
            line for line in daemon.log.read_text().splitlines()
            if "level=warning" in line or "level=error" in line))

    def check_nothing_is_left(self, daemon):
        self.assertEqual(sorted(path.name for path in (daemon.store / "incoming").iterdir()), [])
        left = [path.name for path in daemon.state.iterdir() if path.name.endswith(".tmp")]
        self.assertEqual(left, [])
        # What is booked is what is resident.
        def booked_as_resident():
            resident = 0
            for model in ("planner", "detector"):
                for row in self.rows(daemon, "versions", model, "--all")["items"]:
                    resident += row["hostBytes"]
                    if row["state"] in ("RESERVED", "LOADING", "UNLOADING", "DRAINING"):
                        return False
            pools = {pool["name"]: pool for pool in self.rows(daemon, "status")["budgets"]}
            return pools["host"]["reservedBytes"] == resident
        wait_for("the bookings to be those of what is resident", booked_as_resident)


class CrashOfTheDaemon(CrashCase):
    def publish_action(self, daemon, source, *arguments):
        return daemon.ctl_start("publish", source, "--model", "planner", "--version", *arguments)

    def test_publish(self):
        source = self.give(models.simple_model(self.folder / "third", 3))

        def check(daemon):
            versions = {row["version"] for row in self.rows(daemon, "versions", "planner")["items"]}
            self.assertIn(versions, ({1, 2}, {1, 2, 3}))
            done = daemon.ctl("publish", source, "--model", "planner", "--version", 3, "--label",
                              "stable")
            self.assertEqual(done.code, EXIT_OK, str(done))
            self.assertEqual(self.label_of(daemon, "planner"), 3)

        self.kill_at_each_step(lambda daemon: None,
                               lambda daemon: self.publish_action(daemon, source, 3), check)

    def test_repair(self):
        source = self.give(models.simple_model(self.folder / "second", 2))

        def prepare(daemon):
            weights = daemon.store / "models/planner/versions/2/model.safetensors"
            weights.chmod(0o644)
            with open(weights, "r+b") as file:
                file.seek(-8, os.SEEK_END)
                file.write(b"\xff" * 8)
            weights.chmod(0o444)
            done = daemon.ctl("verify", "planner@2")
            self.assertEqual(done.code, EXIT_INTEGRITY, str(done))

        def check(daemon):
            # The bad version or the good one, and never none.
            self.assertEqual({row["version"] for row in
                              self.rows(daemon, "versions", "planner")["items"]}, {1, 2})
            daemon.ctl("verify", "planner@2")
            done = daemon.ctl("publish", source, "--model", "planner", "--version", 2, "--label",
                              "stable")
            self.assertEqual(done.code, EXIT_OK, str(done))
            client = self.client(daemon=daemon)
            client.ok("acquire", ref="planner")
            self.assertEqual(client.ok("seeds")["seeds"], [2])
            client.close()

        self.kill_at_each_step(prepare, lambda daemon: self.publish_action(daemon, source, 2), check)

    def test_load(self):
        def check(daemon):
            self.assertEqual(daemon.ctl("load", "planner@2").code, EXIT_OK)

        self.kill_at_each_step(lambda daemon: None,
                               lambda daemon: daemon.ctl_start("load", "planner@2"), check)

    def test_swap(self):
        def check(daemon):
            self.assertIn(self.label_of(daemon, "planner"), (1, 2))
            self.assertEqual(daemon.ctl("swap", "planner", "--version", 2).code, EXIT_OK)
            self.assertEqual(self.label_of(daemon, "planner"), 2)

        self.kill_at_each_step(
            lambda daemon: None,
            lambda daemon: daemon.ctl_start("swap", "planner", "--version", 2), check)

    def test_swap_of_a_set(self):
        def prepare(daemon):  # The loads have a case of their own.
            for ref in ("planner@2", "detector@2"):
                self.assertEqual(daemon.ctl("load", ref).code, EXIT_OK)

        swap = ("swap", "planner", "--version", 2, "--set", "detector=2")

        def check(daemon):
            self.assertIn((self.label_of(daemon, "planner"), self.label_of(daemon, "detector")),
                          ((1, 1), (2, 2)), "a set moves as a whole")
            self.assertEqual(daemon.ctl(*swap).code, EXIT_OK)

        self.kill_at_each_step(prepare, lambda daemon: daemon.ctl_start(*swap), check)

    def test_unload(self):
        def prepare(daemon):
            self.assertEqual(daemon.ctl("load", "planner@2").code, EXIT_OK)

        def check(daemon):
            self.assertEqual(daemon.ctl("unload", "planner@2").code, EXIT_OK)

        self.kill_at_each_step(prepare, lambda daemon: daemon.ctl_start("unload", "planner@2"), check)

    def test_a_grant(self):
        def acquire(daemon):
            client = self.client(daemon=daemon)
            client.begin("acquire", ref="planner", deadline_ms=20000)
            self.waiting = client

        def check(daemon):
            # It asked the dead daemon, and is answered by the next.
            self.assertTrue(self.waiting.answer()["ok"])
            self.assertEqual(self.waiting.ok("seeds")["seeds"], [1])
            self.waiting.close()

        def action(daemon):
            acquire(daemon)
            if daemon.env.get("MODELHOST_FAULT_LIST"):
                check(daemon)

        self.kill_at_each_step(lambda daemon: None, action, check)

    def test_start(self):
        CASES_RUN.add("test_start")
        recorded = self.copy("recorded")
        points = point_list(recorded.folder)
        recorded.record(points)
        recorded.start()
        wait_for("the labels to be served", lambda: all(
            self.rows(recorded, "versions", model)["items"][0]["state"] == "READY"
            for model in ("planner", "detector")))
        recorded.stop()
        during = points.read_text().split()
        PASSED.update(during)
        steps = occurrences([], during)
        for step in steps:
            with self.subTest(step):
                daemon = self.copy(step.replace(":", "-"))
                epochs = []
                for _ in range(2):  # And again, in the middle of picking up the pieces.
                    daemon.arm(step)
                    daemon.start(wait_ready=False)
                    daemon.wait_killed()
                    epochs.append(json.loads((daemon.state / "labels.json").read_text())["epoch"])
                daemon.disarm()
                daemon.start()
                self.check_all_is_well(daemon)
                self.check_nothing_is_left(daemon)
                epochs.append(self.rows(daemon, "status")["epoch"])
                self.assertEqual(epochs, sorted(epochs))
                self.assertGreater(epochs[-1], epochs[-2])
                self.assertEqual(daemon.stop(), 0)
        print(f"[{len(steps)} steps] ", end="", flush=True)

    def test_z_every_step_of_the_list_was_passed(self):
        of_the_daemon = {name for name in LISTED if not name.startswith(("ctl.", "client."))}
        mine = {name for name in dir(self) if name.startswith("test_")} - {
            "test_z_every_step_of_the_list_was_passed"}
        if not mine <= CASES_RUN:
            self.skipTest("only some of the cases were run")
        self.assertEqual(of_the_daemon - PASSED, set())


class CrashOfModelctl(CrashCase):
    def test_publish_at_its_own_steps(self):
        source = models.simple_model(self.folder / "third", 3)
        for number in range(70):  # More than go into one frame.
            (source / f"note-{number}.txt").write_text(f"note {number}\n")
        self.give(source)
        publish = ("publish", source, "--model", "planner", "--version", 3)
        steps = [name for name in LISTED if name.startswith("ctl.")]
        for step in steps:
            with self.subTest(step):
                daemon = self.copy(step)
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
                    if row["state"] in ("RUNNING", "QUEUED"):  # Waits for a minute.
                        self.assertEqual(row["kind"], "publish", row)
                        daemon.ctl("ops", "cancel", row["id"])
                wait_for("nothing in incoming",
                         lambda: not list((daemon.store / "incoming").iterdir()))
                self.assertEqual(daemon.stop(), 0)


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
