"""What the cases of test_crash*.py share: kill -9 at a step, and the look at what was left.

What the steps are, proto/handle/fault_point.h says; programs that are linked with
tests/faults/fault_point_armed.cc end themselves there. Each case first lets its action run through
and notes the steps that it passes, then repeats it from the same beginning once for each step, is
killed there, starts the daemon that ships on what was left, and looks whether all is well.

By default the steps that are in every action (SHARED) are taken in the first case that passes them
only; with MODELHOST_STRESS=full in each. Some steps are tried at once, each in its own folders.
"""
import collections
import concurrent.futures
import re
import signal
import subprocess

import harness
from harness import EXIT_OK, PROGRAMS, ROOT, Case, Daemon, wait_for

LISTED = re.findall(r'^    "([a-z]+\.[a-z_]+)",$',
                    (ROOT / "proto/handle/fault_point.h").read_text(), re.M)
PASSED = set()  # By the cases that have run.
CASES_RUN = set()
# Of a scan, which may come at any time, and of the stop that ends a recorded run: they have cases of
# their own.
NOT_OF_AN_ACTION = ("start.", "park.left")
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

    def ended(self):
        self.notify.close()

    def wait_killed(self):
        try:
            code = self.process.wait(harness.DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not pass the step:\n{self.log_tail()}") from None
        self.told_to_end = True
        self.ended()
        if code != -signal.SIGKILL:
            raise AssertionError(f"modelhostd ended with {code}:\n{self.log_tail()}")


def seed_of(model, version):
    """No two versions share a file's bytes, so that sums of bytes are sums of bookings."""
    return version + (100 if model == "detector" else 0)


def chosen(passed, often=("file.", "publish.file", "gc.removed", "park.", "restore.")):
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
    config = REQUIRED

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
        return self.daemon_on(folder)

    def daemon_on(self, folder):
        daemon = Faulty(folder, wait=False, config=self.config)
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
        steps = chosen([name for name in passed if not name.startswith(NOT_OF_AN_ACTION) and
                        (only is None or name.startswith(only))])
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
