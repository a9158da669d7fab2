"""kill -9 at every step: of the daemon, of modelctl, and of a client.

What the steps are, proto/handle/fault_point.h says; programs that are linked with
tests/faults/fault_point_armed.cc end themselves there. Each case first lets its action run through
and notes the steps that it passes, then repeats it from the same beginning once for each step, is
killed there, starts the daemon that ships on what was left, and looks whether all is well.

By default the steps that are in every action (SHARED) are taken in the first case that passes them
only; with MODELHOST_STRESS=full in each. Some steps are tried at once, each in its own folders.
"""
import collections
import concurrent.futures
import json
import os
import pathlib
import re
import signal
import subprocess

import models
from harness import (EXIT_INTEGRITY, EXIT_NOT_FOUND, EXIT_OK, PROGRAMS, ROOT, Case, Client, Daemon,
                     wait_for)
import harness

LISTED = re.findall(r'^    "([a-z]+\.[a-z_]+)",$',
                    (ROOT / "proto/handle/fault_point.h").read_text(), re.M)
PASSED = set()  # By the cases that have run.
CASES_RUN = set()
SHARED = ("file.", "journal.", "publish.", "load.")
TAKEN = set()  # Of those, by the cases that have run.
AT_ONCE = 4


class Faulty(Daemon):
    """A daemon that may be told to end at a step."""

    @property
    def points(self):
        return self.folder / "points"

    def arm(self, point):
        """From now on; in a daemon that was started with `faulty`."""
        part = self.folder / "fault.part"
        part.write_text(point)
        part.chmod(0o644)
        part.rename(self.folder / "fault")

    def record(self):
        """The steps that are passed from now on go into `points`."""
        part = self.folder / "points.part"
        part.write_text("")
        part.chmod(0o666)
        part.rename(self.points)

    def faulty(self, **env):
        self.program = PROGRAMS.faulty_daemon
        self.env = env or {"MODELHOST_FAULT_FILE": str(self.folder / "fault"),
                           "MODELHOST_FAULT_LIST": str(self.points)}
        return self

    def product(self):
        self.program, self.env = None, {}
        return self

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


def chosen(passed, often=("file.", "publish.file")):
    """NAME:NTH for the first time that each step is passed, and for some the last one, too."""
    counts = collections.Counter(passed)
    steps = []
    for name, count in counts.items():
        if name.startswith(SHARED):
            if name in TAKEN and not harness.FULL:
                continue
            TAKEN.add(name)
        last = {count} if name.startswith(often) else set()
        steps += [f"{name}:{number}" for number in sorted({1} | last)]
    return steps


DEADLINE_MS = int(harness.DEADLINE_S * 1000)
REQUIRED = "".join(f'[[models]]\nname = "{model}"\nrequired = true\n'
                   for model in ("planner", "detector"))


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
        """A daemon on a copy of all that; it is READY when both labels serve."""
        folder = self.folder / name.replace(":", "-")
        subprocess.run(["cp", "-a", str(self.template), str(folder)], check=True)
        daemon = Faulty(folder, wait=False, config=REQUIRED)
        self.addCleanup(self._finish, daemon)
        return daemon

    def kill_at_each_step(self, action, check, prepare=lambda daemon: None, only=None):
        """`action(daemon)` returns the process that asks for it; `check(daemon, client)` runs on
        the next daemon. `only`: the steps that count, by how they begin."""
        CASES_RUN.add(self.id().rsplit(".", 1)[-1])
        recorded = self.copy("recorded").faulty()
        recorded.start()
        prepare(recorded)
        recorded.record()
        self.end_of(action(recorded), expect=EXIT_OK)
        recorded.stop()
        passed = recorded.points.read_text().split()
        PASSED.update(passed)
        steps = chosen([name for name in passed if only is None or name.startswith(only)])
        self.assertTrue(steps)
        self.at_once(steps, lambda daemon, step: self.crash_once(
            daemon, step, prepare, action, check))

    def at_once(self, steps, trial):
        """`trial(daemon, step)` for each, some at a time, each with a daemon of its own that does not
        run yet."""
        def one(step):
            daemon = self.copy(step)
            try:
                trial(daemon, step)
            finally:
                # The kernel ends it with this thread: not before it was looked at.
                if daemon.alive:
                    daemon.kill()

        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            trials = [(step, pool.submit(one, step)) for step in steps]
        for step, done in trials:
            with self.subTest(step):
                done.result()
        print(f"[{len(steps)} steps] ", end="", flush=True)

    def crash_once(self, daemon, step, prepare, action, check):
        daemon.faulty().start()
        reader = self.client(daemon=daemon)
        reader.ok("acquire", ref="planner@1")
        prepare(daemon)
        daemon.arm(step)
        process = action(daemon)
        daemon.wait_killed()
        self.end_of(process)
        self.assertEqual(reader.ok("seeds")["seeds"], [1], "a reader that was attached")
        daemon.product().start()
        self.check_labels(daemon, reader)
        self.assertEqual(reader.ok("seeds")["seeds"], [1], "after the restart")
        check(daemon, reader)
        self.check_nothing_is_left(daemon)
        reader.close()

    def end_of(self, process, expect=None):
        if process is None:
            return
        out, err = process.communicate(timeout=2 * harness.DEADLINE_S)
        if expect is not None:
            self.assertEqual(process.returncode, expect, out + err)

    def do(self, daemon, *arguments, expect=EXIT_OK):
        result = daemon.ctl(*arguments)
        self.assertEqual(result.code, expect, str(result))

    def rows(self, daemon, *arguments):
        result = daemon.ctl("-o", "json", *arguments)
        self.assertEqual(result.code, EXIT_OK, str(result))
        return result.json()

    def labels(self, daemon):
        return {row["name"]: next((label["version"] for label in row["labels"]
                                   if label["label"] == "stable"), 0)
                for row in self.rows(daemon, "ls")["items"]}

    def check_labels(self, daemon, client):
        """They name what is there and serves; nobody gets a byte of another version. It is READY."""
        for model, version in self.labels(daemon).items():
            got = client.ok("acquire", ref=model, key=model, wait=True, deadline_ms=DEADLINE_MS)
            self.assertEqual(got["version"], version)
            self.assertEqual(client.ok("seeds", key=model)["seeds"], [seed_of(model, version)])
            client.ok("release", key=model)
        # No operation of the dead daemon is taken for one that runs.
        for row in self.rows(daemon, "ops", "ls")["items"]:
            self.assertNotIn(row["state"], ("running", "queued"), row)
        for line in daemon.log.read_text().splitlines():
            if "level=warning" in line or "level=error" in line:
                self.assertNotIn("journal", line)

    def check_nothing_is_left(self, daemon):
        self.assertEqual(sorted(path.name for path in (daemon.store / "incoming").iterdir()), [])
        wait_for("no half-written file", lambda: not [
            path.name for path in daemon.state.iterdir() if path.name.endswith(".tmp")])

        def booked_as_resident():
            resident = 0
            for model in self.rows(daemon, "ls")["items"]:
                for row in model["versions"]:
                    self.assertNotIn(row["state"], ("INVALID", "QUARANTINED"), row)
                    resident += row["hostBytes"]
            status = self.rows(daemon, "status")
            self.assertEqual(status["invalidTransitions"], 0)
            host = next(pool for pool in status["budgets"] if pool["name"] == "host")
            return host["reservedBytes"] == resident
        wait_for("the bookings to be those of what is resident", booked_as_resident)


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

    def test_start(self):
        CASES_RUN.add("test_start")
        recorded = self.copy("recorded").faulty()
        recorded.record()
        recorded.start()
        recorded.stop()
        passed = recorded.points.read_text().split()
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
