"""Room and rights: swaps that do not fit, drains with deadlines, evicted leases, shares of one user."""
import os
import re
import socket
import struct
import unittest
import urllib.request

import frames
import harness
from harness import (CLIENT, EXIT_CONFLICT, EXIT_OLD_SERVES, EXIT_PERMISSION, EXIT_RESOURCES,
                     EXIT_USAGE, GUEST, GUESTS, OPERATOR, READERS, STRANGER, Case, needs_root, smoke,
                     wait_for)

MODEL_BYTES = 4 << 20
BUDGET = '[memory]\nhost_budget = "6MiB"\n'
EVENT = struct.Struct("=IIQQQ")  # kind, slot, generation, version, lease
EVICTED = 5


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RoomCase(Case):
    start_daemon = False
    config = BUDGET

    def setUp(self):
        super().setUp()
        self.port = free_port()
        self.daemon = self.new_daemon(config=self.config, metrics=f"127.0.0.1:{self.port}")

    def metric(self, series):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found = re.search("^" + re.escape(series) + r" (\S+)$", text, re.MULTILINE)
        return float(found.group(1)) if found else None

    def two(self):
        """planner@1 is stable, planner@2 is there, and there is room for one."""
        for version in (1, 2):
            self.publish("planner", version, tensors=4, tensor_bytes=MODEL_BYTES // 4)
        self.ctl("swap", "planner", "--version", "1")

    def stable(self):
        return [row["version"] for row in self.json("label", "ls")["items"]
                if row["model"] == "planner" and row["label"] == "stable"][0]


class Strategies(RoomCase):
    @smoke
    def test_what_does_not_fit_needs_the_operators_word(self):
        self.two()
        for strategy in ("availability", "auto"):
            result = self.ctl("swap", "planner", "--version", "2", "--strategy", strategy,
                              expect=EXIT_RESOURCES)
            self.assertRegex(result.err, r"needs 4\.0 MiB.*2\.0 MiB of 6\.0 MiB left.*planner@1"
                                         r".*--allow-downtime")
            self.ctl("swap", "planner", "--version", "2", "--strategy", strategy, "--dry-run",
                     expect=EXIT_RESOURCES)
        self.ctl("swap", "planner", "--version", "2", "--strategy", "resource", expect=EXIT_CONFLICT)
        self.assertEqual(self.version_row("planner", 1)["state"], "READY")
        self.assertEqual(self.stable(), 1)
        plan = self.json("swap", "planner", "--version", "2", "--strategy", "auto",
                         "--allow-downtime", "--dry-run")
        self.assertEqual((plan["kind"], plan["strategy"], plan["downtime"], plan["fits"]),
                         ("SwapPlan", "resource", True, True))
        host = plan["pools"][0]
        self.assertEqual((host["name"], host["limitBytes"]), ("host", 6 << 20))
        self.assertLess(host["peakBytes"], 6 << 20)
        text = self.ctl("swap", "planner", "--version", "2", "--strategy", "auto",
                        "--allow-downtime", "--dry-run").out
        self.assertIn("DOWNTIME", text)
        self.assertEqual(self.stable(), 1)

    def test_a_reader_that_waits_gets_the_new_one(self):
        self.two()
        client = self.client()
        client.ok("acquire", ref="planner")
        swap = self.daemon.ctl_start("swap", "planner", "--version", "2", "--strategy", "auto",
                                     "--allow-downtime")
        wait_for("the drain", lambda: self.version_row("planner", 1)["state"] == "DRAINING")
        self.assertEqual(client.ok("superseded")["superseded"], 1)
        self.assertEqual(client.ok("seeds")["seeds"], [1], "nothing is taken from under it")
        other = self.client()
        self.assertFalse(other.call("acquire", ref="planner")["ok"])
        other.begin("acquire", ref="planner", wait=True, deadline_ms=30000)
        client.ok("release")
        self.assertEqual(other.answer()["version"], 2)
        out, err = swap.communicate(timeout=harness.DEADLINE_S)
        self.assertEqual(swap.returncode, 0, err)
        self.assertRegex(out, r"planner:stable 1 -> 2  generation 3  load .* gap ")
        self.assertEqual(self.version_row("planner", 1)["state"], "STAGED")

    def test_a_new_version_that_does_not_load_gives_the_old_one_back(self):
        self.two()
        path = self.daemon.store / "models/planner/versions/2/model.safetensors"
        path.chmod(0o644)
        with open(path, "r+b") as file:
            file.seek(-16, os.SEEK_END)
            file.write(b"\xff" * 8)
        path.chmod(0o444)
        result = self.ctl("swap", "planner", "--version", "2", "--strategy", "resource",
                          "--allow-downtime", expect=EXIT_OLD_SERVES)
        self.assertRegex(result.err, r"planner@1 serves again after a gap of")
        client = self.client()
        self.assertEqual(client.ok("acquire", ref="planner")["version"], 1)
        self.assertEqual(client.ok("seeds")["seeds"], [1])

    def test_a_rollback_takes_the_strategy_of_a_swap(self):
        self.two()
        self.ctl("swap", "planner", "--version", "2", "--strategy", "resource", "--allow-downtime")
        result = self.ctl("rollback", "planner", expect=EXIT_RESOURCES)
        self.assertIn("--allow-downtime", result.err)
        self.assertEqual(self.stable(), 2)
        out = self.ctl("rollback", "planner", "--strategy", "auto", "--allow-downtime").out
        self.assertRegex(out, r"planner:stable 2 -> 1  generation \d+  load .* gap ")

    def test_a_kill_in_the_gap_comes_back_with_the_old_version(self):
        self.two()
        client = self.client()
        client.ok("acquire", ref="planner")
        swap = self.daemon.ctl_start("swap", "planner", "--version", "2", "--strategy", "resource",
                                     "--allow-downtime")
        wait_for("the drain", lambda: self.version_row("planner", 1)["state"] == "DRAINING")
        self.daemon.kill()
        swap.communicate(timeout=harness.DEADLINE_S)
        self.daemon.start()
        wait_for("the old version", lambda: self.version_row("planner", 1)["state"] == "READY")
        self.assertEqual(self.stable(), 1)
        self.assertEqual(self.client().ok("acquire", ref="planner")["version"], 1)


class Drains(RoomCase):
    config = ('[[models]]\nname = "planner"\nkeep_previous = "0s"\ndrain_timeout = "100ms"\n'
              'on_drain_deadline = "release"\n'
              '[[models]]\nname = "detector"\nkeep_previous = "0s"\ndrain_timeout = "100ms"\n')

    def test_release_lets_go_and_the_client_reads_on(self):
        self.two()
        client = self.client()
        client.ok("acquire", ref="planner")
        self.assertEqual(self.json("leases", "--stale")["items"], [])
        self.ctl("swap", "planner", "--version", "2")
        wait_for("the release", lambda: self.version_row("planner", 1)["state"] == "STAGED")
        self.assertEqual(client.ok("seeds")["seeds"], [1])
        [lease] = self.json("leases", "--stale")["items"]
        self.assertEqual((lease["version"], lease["stale"], lease["released"]), (1, True, True))
        self.assertGreater(lease["staleSeconds"], 0)
        self.assertEqual(self.metric('modelhost_stale_leases{model="planner"}'), 1)
        self.assertGreater(
            self.metric('modelhost_oldest_stale_lease_age_seconds{model="planner"}'), 0)
        self.assertEqual(
            self.metric('modelhost_drain_deadlines_total{action="release",model="planner"}'), 1)
        client.ok("release")
        self.wait_leases(0)

    def test_wait_goes_on_draining_and_says_so(self):
        for version in (1, 2):
            self.publish("detector", version)
        self.ctl("swap", "detector", "--version", "1")
        client = self.client()
        client.ok("acquire", ref="detector")
        self.ctl("swap", "detector", "--version", "2")
        wait_for("the alert", lambda: self.metric(
            'modelhost_drain_deadlines_total{action="wait",model="detector"}') == 1)
        self.assertEqual(self.version_row("detector", 1)["state"], "DRAINING")
        self.assertIn("event=drain_deadline", self.daemon.log.read_text())
        self.assertEqual(client.ok("seeds")["seeds"], [1])
        client.ok("release")
        wait_for("the end of the drain",
                 lambda: self.version_row("detector", 1)["state"] == "STAGED")

    def test_an_evicted_client_is_told_and_reads_on(self):
        self.serve("planner", 1)
        client = self.client()
        client.ok("acquire", ref="planner")
        raw = frames.RawClient(self.daemon.handles_socket)
        self.addCleanup(raw.close)
        raw.greet()
        raw.send(frames.subscribe())
        raw.receive()
        mine, _ = raw.grant("planner")
        self.wait_leases(2)
        for lease in self.json("leases")["items"]:
            self.ctl("evict", lease["id"], expect=EXIT_USAGE)
            self.ctl("evict", lease["id"], "--yes")
        self.wait_leases(0)
        self.assertEqual(client.ok("seeds")["seeds"], [1])
        kind, _, frame, _ = raw.receive()
        self.assertEqual(kind, frames.EVENT)
        what, _, _, _, lease = EVENT.unpack_from(frame, frames.HEADER.size)
        self.assertEqual((what, lease), (EVICTED, mine))


class Shares(RoomCase):
    config = (f'[access]\nread_groups = ["{READERS}"]\nadmin_groups = ["{harness.ADMINS}"]\n'
              'max_leases_per_uid = 3\nmax_connections_per_uid = 4\n')

    def test_leases_of_one_user_are_few(self):
        self.serve("planner", 1)
        first, second = self.client(), self.client()
        for key in "abc":
            first.ok("acquire", ref="planner", key=key)
        answer = second.call("acquire", ref="planner")
        self.assertEqual(answer["status"], "RESOURCE_EXHAUSTED", answer)
        self.assertIn("max_leases_per_uid", answer["message"])
        self.assertEqual(self.metric('modelhost_refused_total{reason="leases"}'), 1)
        self.assertRegex(self.daemon.log.read_text(), r"event=refused .*reason=leases")
        first.ok("release", key="a")
        second.ok("acquire", ref="planner")

    def test_connections_of_one_user_are_few_on_both_sockets(self):
        self.serve("planner", 1)
        clients = [self.client() for _ in range(4)]
        one_more = self.client(connect=False).call("connect", deadline_ms=500)
        self.assertFalse(one_more["ok"], one_more)
        wait_for("the refusal to be counted", lambda: (self.metric(
            'modelhost_refused_total{reason="connections"}') or 0) >= 1)
        clients[0].ok("disconnect")
        wait_for("a place", lambda: self.client(connect=False).call("connect")["ok"])

    @needs_root
    def test_root_has_a_share_as_others_have(self):
        self.serve("planner", 1)
        held = []
        self.addCleanup(lambda: [raw.close() for raw in held])

        def connect():
            raw = frames.RawClient(self.daemon.handles_socket)
            held.append(raw)
            try:
                raw.send(frames.hello())
            except frames.Closed:
                pass  # It is refused before it says anything, and the answer is there.
            return raw.receive()[0]

        self.assertEqual([connect() for _ in range(4)], [frames.HELLO_REPLY] * 4)
        self.assertEqual(connect(), frames.ERROR)


@needs_root
class Rights(RoomCase):
    config = f'[[models]]\nname = "planner"\nread_groups = ["{GUESTS}"]\n'

    def test_a_group_that_is_only_supplementary_counts(self):
        # All users here have their own number as their first group; rights come from the others.
        for user, group in ((CLIENT, READERS), (GUEST, GUESTS), (OPERATOR, harness.ADMINS)):
            self.assertIn(group, harness.GROUPS[user])
            self.assertNotEqual(harness.as_user(user)["group"], group)
        self.serve("planner", 1)
        self.serve("detector", 1)
        guest, client = self.client(user=GUEST), self.client()
        guest.ok("acquire", ref="planner")
        client.ok("acquire", ref="detector", key="b")
        for who, ref in ((guest, "detector"), (client, "planner")):
            self.assertEqual(who.call("acquire", ref=ref, key="c")["status"], "PERMISSION_DENIED")
        self.ctl("unload", "detector@1", user=CLIENT, expect=EXIT_PERMISSION)
        self.ctl("status", user=STRANGER, expect=EXIT_PERMISSION)
        self.assertGreaterEqual(self.metric('modelhost_refused_total{reason="no_right"}'), 4)
        self.ctl("status", user=OPERATOR)


if __name__ == "__main__":
    unittest.main()
