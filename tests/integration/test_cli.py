"""What users and scripts see: outputs, exit codes, one-line errors."""
import json
import re
import subprocess
import time
import unittest

import models
from harness import (EXIT_CONFLICT, EXIT_DEGRADED, EXIT_INTEGRITY, EXIT_NOT_FOUND, EXIT_OK,
                     EXIT_UNREACHABLE, EXIT_USAGE, Case, smoke)
import harness

RFC3339 = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$")


class Output(Case):
    @smoke
    def test_every_reading_verb_speaks_json(self):
        self.serve("planner", 1)
        client = self.client()
        client.ok("acquire", ref="planner")
        for arguments in (["status"], ["ls"], ["versions", "planner"], ["describe", "planner"],
                          ["label", "ls"], ["clients"], ["leases"], ["inspect", "planner"],
                          ["ops", "ls"], ["health"], ["doctor"], ["version"]):
            with self.subTest(arguments):
                result = self.daemon.ctl("-o", "json", *arguments)
                self.assertIn(result.code, (EXIT_OK, EXIT_DEGRADED), str(result))
                document = result.json()
                self.assertEqual(document["apiVersion"], "modelhost/v1")
                self.assertTrue(document["kind"])
        status = self.json("status")
        self.assertIsInstance(status["uptimeSeconds"], float)
        self.assertRegex(status["started"], RFC3339)
        self.assertTrue(status["ready"])
        self.assertEqual(status["invalidTransitions"], 0)
        self.assertEqual(status["clients"], 1)

    def test_tables_and_names(self):
        self.serve("planner", 1)
        table = self.ctl("ls").out
        for head in ("MODEL", "LABELS", "VERSIONS READY", "HOST", "DEVICE", "LEASES", "HEALTH"):
            self.assertIn(head, table.splitlines()[0])
        self.assertIn("planner", table)
        table = self.ctl("versions", "planner").out.splitlines()[0]
        for head in ("VERSION", "STATE", "HEALTH", "LABELS", "FORMAT", "SIZE", "DIGEST", "LEASES",
                     "AGE", "REASON"):
            self.assertIn(head, table)
        self.assertEqual(self.ctl("-o", "name", "ls").out, "planner\n")
        self.assertNotIn("\x1b", self.ctl("-o", "wide", "ls").out)
        lines = self.ctl("-o", "jsonl", "versions", "planner").out.splitlines()
        self.assertEqual([json.loads(line)["version"] for line in lines], [1])

    def test_publish_ends_with_one_line_that_says_it(self):
        source = self.give(models.simple_model(self.folder / "p", 8))
        result = self.ctl("publish", source, "--model", "planner", "--version", "8")
        self.assertRegex(result.out.splitlines()[-1],
                         r"^planner@8 published  [\d.]+ \w+  sha256:[0-9a-f]{4,}")

    def test_progress_goes_to_stderr(self):
        source = self.give(models.simple_model(self.folder / "p", 8))
        self.ctl("publish", source, "--model", "planner", "--version", "8")
        result = self.ctl("--progress", "json", "load", "planner@8")
        for line in result.err.splitlines():
            json.loads(line)
        result = self.ctl("-q", "--progress", "none", "unload", "planner@8")
        self.assertEqual(result.err, "")

    def test_health(self):
        self.ctl("health", "-q")
        self.serve("planner", 1)
        self.assertEqual(self.ctl("health", "planner", "-q").out, "")
        self.ctl("health", "speech", expect=EXIT_NOT_FOUND)

    def test_completion_and_help(self):
        for shell in ("bash", "zsh", "fish"):
            self.assertIn("modelctl", self.ctl("completion", shell).out)
        self.assertIn("swap", self.ctl("--help").out)
        for verb in ("publish", "swap", "load", "exec", "describe"):
            self.assertIn(verb, self.ctl(verb, "--help").out)
        done = subprocess.run(["bash", "-n"], input=self.ctl("completion", "bash").out, text=True,
                              check=False)
        self.assertEqual(done.returncode, 0)

    def test_verify(self):
        self.serve("planner", 1)
        self.ctl("verify", "planner@1")
        path = self.daemon.store / "models/planner/versions/1/tokenizer.json"
        path.chmod(0o644)
        path.write_text(path.read_text().replace("1", "2"))
        path.chmod(0o444)
        result = self.ctl("verify", "planner@1", expect=EXIT_INTEGRITY)
        self.assertIn("tokenizer.json", result.err)

    def test_rescan_counts(self):
        self.publish("planner", 1)
        answer = self.json("rescan")
        self.assertEqual((answer["models"], answer["versions"]), (1, 1))

    def test_evict_ends_the_lease_and_not_the_mapping(self):
        self.serve("planner", 1)
        client = self.client()
        client.ok("acquire", ref="planner")
        lease = self.json("leases")["items"][0]["id"]
        self.ctl("--yes", "evict", lease)
        self.wait_leases(0)
        self.assertEqual(client.ok("seeds")["seeds"], [1])


class Codes(Case):
    def test_usage(self):
        for arguments in (["swap", "planner"], ["swap", "planner", "--version", "08"],
                          ["swap", "../x", "--version", "1"], ["frobnicate"], ["load", "planner"],
                          ["status", "--no-such-flag"], ["publish"]):
            with self.subTest(arguments):
                self.ctl(*arguments, expect=EXIT_USAGE)

    def test_not_found(self):
        self.ctl("versions", "planner", expect=EXIT_NOT_FOUND)
        self.ctl("describe", "planner", expect=EXIT_NOT_FOUND)
        self.ctl("publish", "/nonexistent/folder", "--model", "planner", "--version", "1",
                 expect=EXIT_NOT_FOUND)

    def test_conflict(self):
        self.publish("planner", 1)
        self.ctl("label", "set", "planner:canary", "1", expect=EXIT_CONFLICT)

    def test_an_unreachable_daemon_is_named(self):
        self.daemon.stop()
        started = time.monotonic()
        result = self.ctl("status", expect=EXIT_UNREACHABLE)
        self.assertIn("control.sock", result.err)
        self.assertLess(time.monotonic() - started, 10)

    def test_errors_say_what_to_do(self):
        self.publish("planner", 1)
        result = self.ctl("load", "planer@1", expect=EXIT_NOT_FOUND)
        self.assertRegex(result.err, r"^error: .+: .+\(.+\)$")


class Inspect(Case):
    """`inspect` of a path needs no daemon."""

    start_daemon = False

    def run_ctl(self, *arguments):
        done = subprocess.run([harness.PROGRAMS.ctl, *map(str, arguments)], capture_output=True,
                              text=True, timeout=60, env=harness.environment(), check=False)
        return harness.Result(list(map(str, arguments)), done.returncode, done.stdout, done.stderr)

    @smoke
    def test_formats(self):
        cases = {
            "safetensors": models.write_safetensors(self.folder / "one.bin", 1),
            "gguf": models.write_gguf(self.folder / "two.bin", 1),
        }
        for kind, path in cases.items():
            with self.subTest(kind):
                index = self.run_ctl("inspect", path, "-o", "json").json()
                self.assertEqual((index["kind"], index["format"]), ("Index", kind))
                self.assertEqual(len(index["tensors"]), 4)
                tensor = index["tensors"][0]
                with open(path, "rb") as file:
                    file.seek(tensor["offset"])
                    self.assertEqual(models.seeds_in(file.read(tensor["nbytes"])), {1})

    def test_a_folder(self):
        folder = models.write_sharded(self.folder / "set", [1, 2, 3])
        index = self.run_ctl("inspect", folder, "-o", "json").json()
        self.assertEqual(len(index["tensors"]), 6)
        self.assertEqual(len({tensor["file"] for tensor in index["tensors"]}), 3)

    def test_refusals(self):
        bad = self.folder / "bad.safetensors"
        bad.write_bytes(b"\xff" * 100)
        result = self.run_ctl("inspect", bad, "-o", "json")
        self.assertEqual((result.code, result.out), (EXIT_INTEGRITY, ""), str(result))
        self.assertRegex(result.err, r"^error: [^\n]+\n$")


if __name__ == "__main__":
    unittest.main()
