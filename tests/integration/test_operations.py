"""Operations: they outlive who asked for them, and tell the truth, also after a restart."""
import json
import os
import re
import signal
import time
import unittest

import models
from harness import (AS_ROOT, DAEMON, EXIT_CONFLICT, EXIT_NOT_FOUND, EXIT_OK, EXIT_SUPERSEDED,
                     EXIT_TIMEOUT, EXIT_USAGE, Case, smoke, wait_for)

SLOW_BYTES = 4 << 30
PACED_BYTES = 600 << 20


class Operations(Case):
    daemon_options = {"config": "".join(
        f'[[models]]\nname = "{name}"\nresidency = "mapped"\nkeep_on_disk = 2\n'
        for name in ("slow", "planner"))}

    def put_slow(self, version=1, nbytes=SLOW_BYTES):
        """A version that takes long to verify; as an operator's rsync leaves it."""
        model_dir = self.daemon.store / "models" / "slow"
        folder = model_dir / f"versions/{version}"
        folder.mkdir(parents=True)
        with open(folder / "model.safetensors", "wb") as out:
            out.write(models.safetensors_header([("w", "I64", [nbytes // 8], nbytes)]))
            out.truncate(out.tell() + nbytes)  # A hole needs no disk.
        for path in [model_dir, *model_dir.rglob("*")]:
            path.chmod(0o700 if path.is_dir() else 0o400)
            if AS_ROOT:
                os.chown(path, DAEMON, DAEMON)
        self.ctl("rescan")

    def operations(self, kind):
        return [row for row in self.json("ops", "ls")["items"] if row["operationKind"] == kind]

    def show(self, operation):
        return self.json("ops", "show", operation)

    def running(self, kind, phase=None):
        """The operation of that kind that runs, once there is one."""
        def look():
            for row in self.operations(kind):
                if row["state"] == "running" and phase in (None, row["phase"]):
                    return row["id"]
            return None
        return wait_for(f"a {kind} under way", look)

    def start_and_lose(self, kind, *arguments, phase=None):
        """Starts modelctl, and kills it when its operation runs."""
        process = self.daemon.ctl_start(*arguments)
        operation = self.running(kind, phase)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        self.assertEqual(process.returncode, -signal.SIGKILL)
        return operation

    def assert_goes_on(self, operation):
        self.assertEqual(self.show(operation)["state"], "running")

    def assert_succeeds(self, operation):
        self.assertEqual(self.daemon.ctl("ops", "watch", operation, deadline_s=600).code,
                         EXIT_OK)
        shown = self.show(operation)
        self.assertEqual(shown["state"], "succeeded", shown)
        self.assertIn(operation, [row["id"] for row in self.json("ops", "ls")["items"]])
        return shown


class LostStreams(Operations):
    # Slow because it waits: it takes as long on any machine, and costs little.
    daemon_options = {"config": '[load]\npace = "100MiB/s"\n' + Operations.daemon_options["config"]}

    def put_slow(self, version=1, nbytes=PACED_BYTES):
        super().put_slow(version, nbytes)

    def test_a_load_goes_on_without_who_asked_for_it(self):
        self.put_slow()
        operation = self.start_and_lose("load", "load", "slow@1")
        self.assert_goes_on(operation)
        self.assertGreater(self.assert_succeeds(operation)["result"]["bytes"], PACED_BYTES)
        self.assertEqual(self.version_row("slow", 1)["state"], "READY")

    def test_a_swap_goes_on_without_who_asked_for_it(self):
        self.put_slow()
        operation = self.start_and_lose("swap", "swap", "slow", "--version", "1")
        self.assert_goes_on(operation)
        changes = self.assert_succeeds(operation)["result"]["changes"]
        self.assertEqual([(c["from"], c["to"]) for c in changes], [(0, 1)])
        self.assertEqual(self.version_row("slow", 1)["labels"], ["stable"])

    def test_a_verification_goes_on_without_who_asked_for_it(self):
        self.put_slow()
        operation = self.start_and_lose("verify", "verify", "slow@1")
        self.assert_goes_on(operation)
        self.assert_succeeds(operation)

    def test_an_unload_goes_on_without_who_asked_for_it(self):
        self.publish("planner", 1)
        self.ctl("load", "planner@1")
        client = self.client()
        client.ok("acquire", ref="planner@1")
        operation = self.start_and_lose("unload", "unload", "planner@1", phase="drain")
        self.assert_goes_on(operation)
        client.ok("release")
        self.assert_succeeds(operation)
        self.assertEqual(self.version_row("planner", 1)["state"], "STAGED")

    def test_a_publish_goes_on_without_who_asked_for_it(self):
        nbytes = 256 << 20
        folder = self.source()
        with open(folder / "model.safetensors", "wb") as out:
            out.write(models.safetensors_header([("w", "I64", [nbytes // 8], nbytes)]))
            out.truncate(out.tell() + nbytes)
        self.give(folder)
        # From the phase on, the daemon has the descriptors.
        operation = self.start_and_lose("publish", "publish", folder, "--model", "planner",
                                        "--version", "3", phase="copy")
        self.assertRegex(self.assert_succeeds(operation)["result"]["digest"], r"^[0-9a-f]{64}$")
        self.assertEqual(self.version_row("planner", 3)["state"], "STAGED")
        self.ctl("load", "planner@3")

    def test_the_same_publish_twice_at_once_is_made_once_and_told_to_both(self):
        nbytes = 512 << 20
        folder = self.source()
        with open(folder / "model.safetensors", "wb") as out:
            out.write(models.safetensors_header([("w", "I64", [nbytes // 8], nbytes)]))
            out.truncate(out.tell() + nbytes)
        self.give(folder)
        command = ["-o", "json", "publish", folder, "--model", "planner", "--version", "3"]
        both = [self.daemon.ctl_start(*command)]
        self.running("publish", "copy")
        both.append(self.daemon.ctl_start(*command))
        self.running("publish", "wait")
        answers = []
        for process in both:
            out, err = process.communicate(timeout=600)
            self.assertEqual(process.returncode, EXIT_OK, err)
            answers.append(json.loads(out))
        self.assertEqual([answer["unchanged"] for answer in answers], [False, True])
        self.assertEqual(answers[0]["digest"], answers[1]["digest"])

    def test_a_time_out_names_the_operation_which_goes_on(self):
        self.put_slow()
        result = self.ctl("load", "slow@1", "--timeout", "2s", expect=EXIT_TIMEOUT)
        operation = re.search(r"op-\d+", result.err).group()
        self.assert_goes_on(operation)
        self.assert_succeeds(operation)


class Cancelling(Operations):
    def cancel(self, operation):
        """What the daemon answers, and how long the whole command took."""
        started = time.monotonic()
        answer = self.json("ops", "cancel", operation)
        return answer["state"], time.monotonic() - started

    @smoke
    def test_a_cancel_takes_effect_at_once_whatever_is_under_way(self):
        self.put_slow(1)
        self.put_slow(2)
        self.ctl("status")
        commands = [("load", ["load", "slow@1"]), ("verify", ["verify", "slow@1"]),
                    ("swap", ["swap", "slow", "--version", "2"])]
        for kind, arguments in commands:
            process = self.daemon.ctl_start(*arguments)
            operation = self.running(kind)
            state, took = self.cancel(operation)
            started = time.monotonic()
            self.daemon.ctl("ops", "show", operation)
            whole = time.monotonic() - started
            # The answer has the state that the cancel left.
            self.assertEqual(state, "cancelled", kind)
            print(f"cancel of a {kind}: {took * 1000:.0f} ms as a command, of which "
                  f"{whole * 1000:.0f} ms are any command's", flush=True)
            _, err = process.communicate()
            self.assertEqual(process.returncode, EXIT_SUPERSEDED, err)
            self.assertIn("cancelled", err)
        for version in (1, 2):
            wait_for("the loads to come to rest",
                     lambda v=version: self.version_row("slow", v)["state"] == "STAGED")

    def test_a_newer_one_is_named_as_the_successor(self):
        self.put_slow(1)
        self.publish("slow", 3)
        process = self.daemon.ctl_start("swap", "slow", "--version", "1")
        older = self.running("swap")
        self.ctl("swap", "slow", "--version", "3")
        _, err = process.communicate()
        self.assertEqual(process.returncode, EXIT_SUPERSEDED, err)
        newer = self.operations("swap")[0]["id"]
        self.assertIn(f"superseded by {newer}", err)
        shown = self.show(older)
        self.assertEqual((shown["state"], shown["successor"]), ("aborted", newer))
        self.assertEqual(shown["failure"]["reason"], "SUPERSEDED")
        self.assertEqual(shown["failure"]["metadata"], {"successor": newer})
        self.assertIn(newer, self.ctl("ops", "show", older).out)
        self.assertEqual(self.daemon.ctl("ops", "watch", older).code, EXIT_SUPERSEDED)


class Journal(Operations):
    def test_a_restart_knows_what_was_done_and_what_was_not(self):
        self.serve("planner", 1)
        done = self.operations("swap")[0]
        self.put_slow()
        process = self.daemon.ctl_start("load", "slow@1")
        lost = self.running("load")
        journal = self.daemon.state / "operations.jsonl"
        wait_for("its line in the journal", lambda: f'"id": {lost[3:]},' in journal.read_text())
        self.daemon.kill()
        _, err = process.communicate()
        self.assertIn(f"modelctl ops show {lost}", err)
        with open(journal, "a", encoding="utf-8") as out:
            out.write('{"id": 99, "kin')  # As a crash in the middle of a write leaves it.
        self.daemon.start()
        self.assertEqual(self.show(done["id"])["state"], "succeeded")
        shown = self.show(lost)
        self.assertEqual(shown["state"], "aborted")
        self.assertIn("the daemon ended before it did", shown["failure"]["message"])
        self.assertIn("modelctl load slow@1", shown["failure"]["message"])
        self.assertNotIn("successor", shown)
        self.assertEqual(self.daemon.ctl("ops", "watch", lost).code, EXIT_SUPERSEDED)
        self.ctl("load", "planner@1")
        newest = self.json("ops", "ls")["items"][0]
        self.assertGreater(int(newest["id"][3:]), int(lost[3:]))

    def test_a_broken_journal_is_put_aside_and_said(self):
        self.serve("planner", 1)
        self.daemon.stop()
        journal = self.daemon.state / "operations.jsonl"
        journal.write_bytes(b"\x00\xff\n" + journal.read_bytes())
        self.daemon.start()
        self.assertTrue(self.operations("swap"))
        self.assertTrue((self.daemon.state / "operations.jsonl.broken").exists())
        self.assertIn("operations.jsonl.broken", self.daemon.log.read_text())


class Removing(Operations):
    def test_a_version_that_nobody_needs_is_deleted(self):
        self.serve("planner", 1)
        self.publish("planner", 2)
        self.ctl("delete", "planner@1", "--yes", expect=EXIT_CONFLICT)
        plan = self.json("delete", "planner@2", "--dry-run")
        self.assertGreater(plan["freedBytes"], 0)
        self.assertEqual(self.version_row("planner", 2)["state"], "STAGED")
        self.ctl("delete", "planner@2", expect=EXIT_USAGE)  # Nobody to ask.
        result = self.json("delete", "planner@2", "--yes")
        self.assertEqual(result["state"], "succeeded")
        self.assertEqual(result["result"]["freedBytes"], plan["freedBytes"])
        self.assertFalse((self.daemon.store / "models/planner/versions/2").exists())
        self.assertEqual(list((self.daemon.store / "incoming").iterdir()), [])
        self.ctl("delete", "planner@2", "--yes", expect=EXIT_NOT_FOUND)
        self.ctl("load", "planner@2", expect=EXIT_NOT_FOUND)

    def test_a_client_keeps_what_it_has_mapped_of_a_version_that_goes(self):
        self.serve("planner", 1)
        self.publish("planner", 2)
        client = self.client()
        client.ok("acquire", ref="planner")
        self.ctl("swap", "planner", "--version", "2")
        self.ctl("delete", "planner@1", "--yes", expect=EXIT_CONFLICT)
        lease = self.json("leases")["items"][0]["id"]
        self.ctl("evict", lease, "--yes")
        self.ctl("delete", "planner@1", "--yes")
        self.assertEqual(client.ok("seeds")["seeds"], [1])

    def test_gc_leaves_what_is_needed_and_as_many_as_the_policy_says(self):
        for version in range(1, 6):
            self.publish("planner", version)
        self.ctl("swap", "planner", "--version", "1")
        partial = self.daemon.store / "incoming" / ("0" * 32 + ".partial")
        partial.mkdir()
        if AS_ROOT:
            os.chown(partial, DAEMON, DAEMON)
        (partial / "half.bin").write_bytes(b"x" * 1000)
        plan = self.json("gc", "--dry-run")
        kinds = [(item["itemKind"], item["version"]) for item in plan["items"]]
        self.assertEqual([k for k in kinds if k[0] == "version"],
                         [("version", 2), ("version", 3)])
        self.assertIn(("staging", 0), kinds)
        result = self.json("gc")
        self.assertEqual(result["result"]["removedVersions"], 2)
        self.assertEqual(result["result"]["freedBytes"], plan["freedBytes"])
        rows = self.json("versions", "planner", "--all")["items"]
        self.assertEqual(sorted(row["version"] for row in rows), [1, 4, 5])
        self.assertFalse(partial.exists())
        self.assertIn("nothing to collect", self.ctl("gc").out)
        self.ctl("gc", "nobody", expect=EXIT_NOT_FOUND)


class Events(Operations):
    def test_events_are_listed_and_followed(self):
        self.serve("planner", 1)
        lines = [json.loads(line) for line in
                 self.ctl("-o", "jsonl", "events").out.splitlines()]
        self.assertEqual([line["sequence"] for line in lines], list(range(1, len(lines) + 1)))
        self.assertIn("ready", [line["what"] for line in lines])
        last = lines[-1]["sequence"]
        self.assertEqual(self.ctl("-o", "jsonl", "events", "--since", last).out, "")
        self.assertEqual(len(self.json("events", "--since", "1h")["items"]), last)
        self.assertEqual(self.json("events", "--model", "nobody")["items"], [])
        follower = self.daemon.ctl_start("-o", "jsonl", "events", "--follow", "--since", last,
                                         "--model", "planner")
        self.publish("planner", 2)
        self.ctl("swap", "planner", "--version", "2")
        seen = []
        while "swap succeeded" not in seen:
            line = follower.stdout.readline()
            self.assertTrue(line, "the stream ended")
            event = json.loads(line)
            self.assertGreater(event["sequence"], last)
            seen.append(event["what"])
        follower.kill()
        follower.communicate()
        for what in ("publish started", "published", "ready", "label"):
            self.assertIn(what, seen)


if __name__ == "__main__":
    unittest.main()
