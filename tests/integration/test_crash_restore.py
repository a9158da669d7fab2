"""kill -9 at every step of what a daemon does with systemd's fd store (fdstore.py plays it).

After each, the next daemon is READY with the right bytes, everything is booked once, the epoch is a
higher one, the lease of a client that was there is declared again, and the store has what the record
says, once each, and nothing else: the daemon after the next finds all of it.
"""
import json
import signal

import fdstore
import test_crash
import test_crash_device
from crash_case import CASES_RUN, KILLED, LISTED, REQUIRED, TAKEN, CrashCase, Faulty, chosen
from harness import Case, wait_for

OF_A_BATCH = ("park.gone", "park.stored", "park.written", "park.recorded")


class KeptFaulty(Faulty, fdstore.KeptDaemon):
    def ended(self):
        pass  # The store outlives it.


class CrashWithAnFdStore(CrashCase):
    config = REQUIRED.replace("required = true", 'required = true\nresidency = "sealed"')

    def daemon_on(self, folder):
        (folder / "notify.sock").unlink(missing_ok=True)
        daemon = KeptFaulty(folder, config=self.config)
        self.addCleanup(daemon.close)
        self.addCleanup(self._finish, daemon)
        return daemon

    def check_store(self, daemon):
        def same():
            record = json.loads((daemon.state / "parked.json").read_text())
            known = [region["name"] for region in record["regions"]] + [
                version["index"]["name"] for version in record["versions"] if version["index"]]
            stored = daemon.keeper.names()
            parked = self.rows(daemon, "status")["restart"]["parked"]
            return sorted(known) == sorted(stored) and parked == len(stored) > 0
        wait_for("the store to have what the record says", same)

    def check_next(self, daemon, reader):
        """The daemon that runs, and the one after it, which finds all of that one's."""
        self.assertEqual(reader.ok("seeds")["seeds"], [1])
        self.wait_leases(1, daemon=daemon)
        self.check_store(daemon)
        self.check_nothing_is_left(daemon)
        epoch = self.rows(daemon, "status")["epoch"]
        stored = len(daemon.keeper.names())
        daemon.kill()
        daemon.start()
        status = self.rows(daemon, "status")
        self.assertEqual(status["epoch"], epoch + 1)
        restart = status["restart"]
        self.assertEqual((restart["received"], restart["foreign"], restart["failedVersions"],
                          restart["rereadVersions"], restart["problem"]), (stored, 0, 0, 0, ""))
        for model in ("planner", "detector"):
            load = self.rows(daemon, "describe", f"{model}@1")["version"]["lastLoad"]
            self.assertEqual((load["source"], load["diskBytes"]), ("restore", 0))
        self.wait_leases(1, daemon=daemon)
        self.check_labels(daemon, reader)
        self.check_store(daemon)
        self.check_nothing_is_left(daemon)

    def test_parking(self):
        def check(daemon, client):
            self.do(daemon, "load", "planner@2")
            client.ok("acquire", ref="planner@2", key="new")
            self.assertEqual(client.ok("seeds", key="new")["seeds"], [2])
            client.ok("release", key="new")
            self.check_next(daemon, client)

        self.kill_at_each_step(lambda daemon: daemon.ctl_start("load", "planner@2"), check,
                               only=OF_A_BATCH)

    def test_leaving_the_store(self):
        def check(daemon, client):
            self.do(daemon, "unload", "planner@2")
            self.check_next(daemon, client)
            self.assertNotIn(2, [version["version"] for version in json.loads(
                (daemon.state / "parked.json").read_text())["versions"]
                if version["model"] == "planner"])

        def unload(daemon):
            process = daemon.ctl_start("unload", "planner@2")
            if not (daemon.folder / "fault").exists():
                # It is told to the store after the answer.
                wait_for("it to be written down", lambda: "park.recorded" in (
                    daemon.points.read_text().split()))
            return process

        self.kill_at_each_step(unload, check, lambda daemon: self.do(daemon, "load", "planner@2"),
                               only=OF_A_BATCH)

    def killed_in_turn(self, passed, end):
        """`end(daemon, step)` brings a daemon that parked all, and has a reader, to its end there."""
        TAKEN.difference_update(passed)  # What is restored is loaded in another way.

        def trial(daemon, step):
            daemon.start()
            reader = self.client(daemon=daemon)
            reader.ok("acquire", ref="planner@1")
            daemon.kill()
            before = json.loads((daemon.state / "labels.json").read_text())["epoch"]
            end(daemon, step)
            self.assertEqual(reader.ok("seeds")["seeds"], [1])
            daemon.product().start()
            self.assertGreater(self.rows(daemon, "status")["epoch"], before + 1)
            self.wait_leases(1, daemon=daemon)
            self.check_labels(daemon, reader)
            self.check_next(daemon, reader)
            reader.close()

        self.at_once(chosen(passed), trial)

    def recorded_restart(self):
        """The steps of a start that finds all in the store, and those of a clean stop after it."""
        daemon = self.copy("recorded")
        daemon.start()
        daemon.kill()
        daemon.faulty().record()
        daemon.start()
        self.check_store(daemon)
        start = daemon.points.read_text().split()
        daemon.record()
        self.assertEqual(daemon.stop(), 0)
        stop = daemon.points.read_text().split()
        return start, stop

    def test_adoption(self):
        CASES_RUN.add("test_adoption")
        start, _ = self.recorded_restart()

        def end(daemon, step):
            daemon.faulty(MODELHOST_FAULT_POINT=step).start(wait_ready=False)
            daemon.wait_killed()

        self.killed_in_turn([name for name in start
                             if name.startswith(("restore.", "park.", "load.ready"))], end)

    def test_a_clean_stop(self):
        CASES_RUN.add("test_a_clean_stop")
        _, stop = self.recorded_restart()
        self.assertNotIn("park.gone", stop, "what is freed at the end stays in the store")

        def end(daemon, step):
            daemon.faulty().start()
            stored = sorted(daemon.keeper.names())
            daemon.arm(step)
            daemon.process.send_signal(signal.SIGTERM)
            daemon.wait_killed()
            self.assertEqual(sorted(daemon.keeper.names()), stored)

        self.killed_in_turn([name for name in stop if name.startswith("park.")], end)


class EveryStep(Case):
    start_daemon = False

    def test_it_was_killed_at_every_step_of_the_list(self):
        of_the_daemon = {name for name in LISTED if not name.startswith(("ctl.", "client."))}
        cases = {name for kind in (test_crash.CrashOfTheDaemon, CrashWithAnFdStore,
                                  test_crash_device.CrashWhileCopying)
                 for name in dir(kind) if name.startswith("test_")}
        if not cases <= CASES_RUN:
            self.skipTest("only some of the cases were run")
        self.assertEqual(of_the_daemon - KILLED, set())
