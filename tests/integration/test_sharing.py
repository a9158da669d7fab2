"""Many processes on one copy: leases, deaths, permissions, files."""
import json
import os
import pathlib
import signal
import subprocess
import unittest

import models
from harness import (AS_ROOT, CLIENT, EXIT_PERMISSION, GUEST, GUESTS, STRANGER, Case, needs_root,
                     smoke, wait_for)


class Sharing(Case):
    @smoke
    def test_eight_processes_read_the_same_bytes(self):
        self.serve("planner", 7)
        clients = [self.client() for _ in range(8)]
        for client in clients:
            self.assertEqual(client.ok("acquire", ref="planner")["version"], 7)
        for client in clients:
            client.begin("seeds")
        for client in clients:
            self.assertEqual(client.answer()["seeds"], [7])
        self.wait_leases(8, "planner")
        self.assertEqual(len(self.json("clients")["items"]), 8)
        for client in clients[:4]:
            client.ok("release")
        self.wait_leases(4, "planner")

    def test_a_lease_ends_with_its_process(self):
        self.serve("planner", 1)
        clients = [self.client() for _ in range(3)]
        for client in clients:
            client.ok("acquire", ref="planner")
        self.wait_leases(3)
        row = self.json("leases")["items"][0]
        self.assertIn(row["pid"], [client.pid for client in clients])
        if AS_ROOT:
            self.assertEqual(row["uid"], CLIENT)
        clients[0].kill()
        self.wait_leases(2)
        clients[1].close()
        self.wait_leases(1)

    def test_a_client_killed_at_any_step_costs_nobody_anything(self):
        self.serve("planner", 1, tensors=4, tensor_bytes=1 << 20)
        stays = self.client()
        stays.ok("acquire", ref="planner")
        steps = [[], ["connect"], ["connect", "acquire"], ["connect", "acquire", "seeds"],
                 ["connect", "follow"]]
        for done in steps:
            with self.subTest(done):
                client = self.client(connect=False)
                for verb in done:
                    client.ok(verb, **({"ref": "planner"} if verb in ("acquire", "follow") else {}))
                # And one more command that it is killed in the middle of.
                client.begin({0: "connect", 1: "acquire"}.get(len(done), "seeds"),
                             **({"ref": "planner"} if len(done) == 1 else {}))
                client.kill()
                self.wait_leases(1)
                self.assertEqual(stays.ok("seeds")["seeds"], [1])
        self.assertTrue(self.daemon.alive)
        wait_for("one client", lambda: len(self.json("clients")["items"]) == 1)

    def test_files_come_as_bytes_and_as_paths(self):
        self.serve("planner", 1)
        client = self.client()
        client.ok("acquire", ref="planner")
        answer = client.ok("file", path="tokenizer.json")
        self.assertEqual(json.loads(answer["text"])["seed"], 1)
        self.assertTrue(answer["same_by_path"])
        self.assertEqual(client.call("file", path="tokeniser.json")["status"], "NOT_FOUND")

    def test_a_forked_child_reads_and_its_end_changes_nothing(self):
        self.serve("planner", 1)
        client = self.client()
        client.ok("acquire", ref="planner")
        self.assertEqual(client.ok("fork_and_read")["seeds"], [1])
        self.wait_leases(1)
        self.assertEqual(client.ok("acquire", ref="planner", key="b")["version"], 1)
        self.assertEqual(client.ok("state")["reconnects"], 0)

    def test_acquire_waits_until_the_model_is_there(self):
        client = self.client()
        self.assertEqual(client.call("acquire", ref="planner")["status"], "NOT_FOUND")
        client.begin("acquire", ref="planner", wait=True, deadline_ms=30000)
        self.serve("planner", 5)
        answer = client.answer()
        self.assertTrue(answer["ok"], answer)
        self.assertEqual(answer["version"], 5)

    def test_acquire_gives_up_at_its_deadline(self):
        client = self.client()
        answer = client.call("acquire", ref="planner", wait=True, deadline_ms=200)
        self.assertEqual(answer["status"], "DEADLINE_EXCEEDED", answer)
        self.assertTrue(answer["message"])

    def test_a_set_comes_from_one_snapshot_or_not_at_all(self):
        self.serve("planner", 1)
        self.serve("detector", 3)
        client = self.client()
        self.assertEqual(client.ok("acquire_set", refs=["planner", "detector"])["versions"], [1, 3])
        answer = client.call("acquire_set", refs=["planner", "speech"])
        self.assertEqual(answer["status"], "NOT_FOUND")
        self.wait_leases(2)

    @needs_root
    def test_a_stranger_may_neither_read_nor_change(self):
        self.serve("planner", 1)
        stranger = self.client(user=STRANGER, connect=False)
        answer = stranger.call("connect")
        if answer["ok"]:
            answer = stranger.call("acquire", ref="planner")
        self.assertEqual(answer["status"], "PERMISSION_DENIED", answer)
        self.ctl("status", user=STRANGER, expect=EXIT_PERMISSION)
        self.ctl("status", user=CLIENT)
        self.ctl("unload", "planner@1", user=CLIENT, expect=EXIT_PERMISSION)
        self.assertEqual(self.version_row("planner", 1)["state"], "READY")

    @needs_root
    def test_a_models_own_groups_admit_to_it_and_to_nothing_else(self):
        guests = f'[[models]]\nname = "planner"\nread_groups = ["{GUESTS}"]\n'
        self.daemon = self.new_daemon(name="own", config=guests)
        self.serve("planner", 1, folder=models.simple_model(self.folder / "p", 1))
        self.serve("detector", 2, folder=models.simple_model(self.folder / "q", 2))
        guest = self.client(user=GUEST)
        guest.ok("acquire", ref="planner")
        self.assertEqual(guest.ok("seeds")["seeds"], [1])
        answer = guest.call("acquire", ref="detector", key="b")
        self.assertEqual(answer["status"], "PERMISSION_DENIED", answer)
        # Who may not read hears nothing of its labels.
        answer = guest.call("acquire", ref="detector:stabel", key="b")
        self.assertEqual(answer["status"], "PERMISSION_DENIED", answer)
        self.assertNotIn("stable", answer["message"])
        reader = self.client()
        reader.ok("acquire", ref="detector")
        answer = reader.call("acquire", ref="planner", key="b")
        self.assertEqual(answer["status"], "PERMISSION_DENIED", answer)
        # The same over control.sock.
        for user, sees, hidden in ((GUEST, "planner", "detector"), (CLIENT, "detector", "planner")):
            rows = self.json("ls", user=user)["items"]
            self.assertEqual([row["name"] for row in rows], [sees])
            self.ctl("versions", sees, user=user)
            result = self.ctl("versions", hidden, user=user, expect=EXIT_PERMISSION)
            self.assertIn("read_groups", result.err)
            leases = self.json("leases", user=user)["items"]
            self.assertEqual({row["model"] for row in leases}, {sees})
        self.ctl("unload", "planner@1", user=GUEST, expect=EXIT_PERMISSION)
        self.assertEqual(len(self.json("ls")["items"]), 2)
        self.ctl("status", user=STRANGER, expect=EXIT_PERMISSION)
        # The daemon is there: what is missing is a group, and no restart brings that.
        found = self.daemon.ctl("doctor", user=STRANGER).out
        self.assertIn("join one of the daemon's read_groups", found)
        self.assertNotIn("start modelhostd", found)
        self.assertNotIn("see the daemon's log", found.replace("clients cannot attach: see the daemon's log", ""))

    def test_exec_gives_an_unmodified_program_the_files(self):
        self.serve("planner", 1)
        done = self.daemon.ctl("exec", "planner", "--", "/usr/bin/python3", "-c",
                               "import json,sys;print(json.load(open(sys.argv[1]+'/tokenizer.json'))"
                               "['seed'])", "{}")
        self.assertEqual((done.code, done.out), (0, "1\n"), str(done))
        done = self.daemon.ctl("exec", "--fd-paths", "planner", "--", "/usr/bin/sha256sum",
                               "{model.safetensors}")
        self.assertEqual(done.code, 0, str(done))
        self.assertRegex(done.out, r"/proc/self/fd/\d+$")
        stored = self.daemon.store / "models/planner/versions/1/model.safetensors"
        self.assertEqual(done.out.split()[0], models.sha256(stored))
        done = self.daemon.ctl("exec", "planner", "--", "/bin/sh", "-c", "exit 42")
        self.assertEqual(done.code, 42)
        self.wait_leases(0)

    def test_exec_holds_the_lease_while_the_program_runs(self):
        self.serve("planner", 1)
        process = self.daemon.ctl_start("exec", "planner", "--", "/bin/sleep", "600")
        try:
            self.wait_leases(1)
        finally:
            # The program outlives a modelctl that is killed alone, and keeps what it has open.
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        self.wait_leases(0)


class DaemonDeath(Case):
    @smoke
    def test_readers_go_on_without_the_daemon_and_find_it_again(self):
        self.serve("planner", 1)
        clients = [self.client() for _ in range(8)]
        for client in clients:
            client.ok("acquire", ref="planner")
        before = clients[0].ok("address", name="layer.0.weight")["address"]
        epoch = clients[0].ok("state")["epoch"]
        self.daemon.kill()
        for client in clients:
            self.assertEqual(client.ok("seeds")["seeds"], [1])
            self.assertEqual(client.ok("superseded")["superseded"], 0)
        self.daemon.start()
        self.wait_leases(8)
        state = clients[0].ok("state")
        self.assertEqual((state["connected"], state["epoch"], state["reconnects"]),
                         (1, epoch + 1, 1))
        self.assertEqual(clients[0].ok("address", name="layer.0.weight")["address"], before)
        self.assertEqual(clients[0].ok("acquire", ref="planner", key="b")["version"], 1)
        self.publish("planner", 2)
        self.ctl("swap", "planner", "--version", "2")
        wait_for("the move to be seen", lambda: clients[0].ok("superseded")["superseded"] == 1)
        self.assertEqual(clients[0].ok("seeds")["seeds"], [1])

    def test_a_clean_stop_leaves_mappings_alone(self):
        self.serve("planner", 1)
        client = self.client()
        client.ok("acquire", ref="planner")
        self.assertEqual(self.daemon.stop(), 0)
        self.assertEqual(client.ok("seeds")["seeds"], [1])
        answer = client.call("acquire", ref="planner", key="b", deadline_ms=200)
        self.assertEqual(answer["status"], "UNAVAILABLE", answer)
        self.assertIn("handles.sock", answer["message"])

    def test_a_missing_daemon_is_waited_for(self):
        self.daemon.stop()
        client = self.client(connect=False)
        client.begin("connect", deadline_ms=30000)
        self.daemon.start()
        self.assertTrue(client.answer()["ok"])


class TornStore(Case):
    """A file of the store is cut while it is mapped. Only somebody with the owner's rights can."""

    start_daemon = False

    def torn(self, residency):
        config = f'[[models]]\nname = "planner"\nresidency = "{residency}"\n'
        self.daemon = self.new_daemon(name=residency, config=config)
        self.serve("planner", 1, folder=models.simple_model(self.folder / f"src-{residency}", 1,
                                                            tensors=4, tensor_bytes=1 << 20))
        client = self.client()
        client.ok("acquire", ref="planner")
        path = self.daemon.store / "models/planner/versions/1/model.safetensors"
        path.chmod(0o644)
        os.truncate(path, 1 << 20)
        return client

    def test_the_daemon_survives_and_says_so(self):
        client = self.torn("pinned")
        wait_for("SUSPECT", lambda: self.version_row("planner", 1)["health"] == "SUSPECT")
        self.assertTrue(self.daemon.alive)
        self.assertTrue(self.version_row("planner", 1)["healthReason"])
        # The library's guard turns the lost page into an error.
        answer = client.call("copy", name="layer.3.weight")
        self.assertEqual(answer["status"], "DATA_LOSS", answer)
        verified = self.daemon.ctl("verify", "planner@1")
        self.assertNotEqual(verified.code, 0, str(verified))
        # Another version can take over.
        self.publish("planner", 2)
        self.ctl("swap", "planner", "--version", "2")
        client.ok("acquire", ref="planner", key="b")
        self.assertEqual(client.ok("seeds", key="b")["seeds"], [2])

    def test_a_sealed_copy_does_not_notice(self):
        client = self.torn("sealed")
        self.assertEqual(client.ok("seeds")["seeds"], [1])
        # Not even a scan, which sees that the file is short, takes it away.
        self.daemon.ctl("rescan")
        late = self.client()
        late.ok("acquire", ref="planner")
        self.assertEqual(late.ok("seeds")["seeds"], [1])
        self.assertEqual(self.version_row("planner", 1)["health"], "OK")
        self.assertTrue(self.daemon.alive)


if __name__ == "__main__":
    unittest.main()
