"""A file that says which version each label names: the daemon goes there by ordinary swaps."""
import os
import re
import subprocess
import unittest
import urllib.request

import harness
from harness import AS_ROOT, ROOT, Case, smoke, wait_for


class Desired(Case):
    start_daemon = False

    def setUp(self):
        super().setUp()
        self.conf = self.folder / "conf"
        self.conf.mkdir(mode=0o755)
        self.conf.chmod(0o755)
        self.file = self.conf / "models"

    def begin(self, **options):
        self.daemon = self.new_daemon(config=f'[desired]\nfile = "{self.file}"\n', **options)

    def write(self, text, mode=0o644):
        """As a careful writer does: by rename."""
        new = self.conf / ".new"
        new.write_text(text)
        new.chmod(mode)
        new.rename(self.file)

    def desired(self):
        return self.json("status")["desired"]

    def in_sync(self, labels):
        def look():
            now = self.desired()
            return now if (now["state"], now["inSync"], now["wanted"]) == ("ok", labels, labels) \
                else None
        return wait_for(f"{labels} labels in sync", look)

    def row(self, model, label="stable"):
        for row in self.desired()["labels"]:
            if (row["model"], row["label"]) == (model, label):
                return row
        return None

    def named(self, model, label="stable"):
        for row in self.json("label", "ls")["items"]:
            if (row["model"], row["label"]) == (model, label):
                return row["version"]
        return 0

    def scrape(self):
        address = self.json("status")["metricsAddress"]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            return answer.read().decode()

    @smoke
    def test_it_converges_from_nothing_and_follows_changes(self):
        self.write("# fleet 12\nplanner.stable = 1\r\nplanner.canary = 2\n\ndetector = 1")
        self.begin()
        self.publish("planner", 1)
        self.publish("planner", 2)
        self.publish("detector", 1)
        self.in_sync(3)
        self.assertEqual([self.named("planner"), self.named("planner", "canary"),
                          self.named("detector")], [1, 2, 1])
        self.write("planner.stable = 2\nplanner.canary = 2\ndetector = 1\n")
        wait_for("planner at 2", lambda: self.named("planner") == 2)
        # Two labels of one model, each on its own; what the file lacks is left alone.
        self.write("planner.stable = 1\n")
        wait_for("planner back at 1", lambda: self.named("planner") == 1)
        self.assertEqual([self.named("planner", "canary"), self.named("detector")], [2, 1])
        swaps = [op for op in self.json("ops", "ls")["items"] if op["operationKind"] == "swap"]
        self.assertTrue(swaps)
        self.assertEqual({op["trigger"] for op in swaps}, {"desired"})
        self.assertIn("the desired state file", self.ctl("ops", "show", swaps[0]["id"]).out)

    def test_a_version_that_comes_later_is_waited_for(self):
        self.write("planner.stable = 5\n")
        self.begin()
        self.publish("planner", 4)
        row = self.row("planner")
        self.assertEqual((row["state"], row["have"], row["want"]), ("pending", 0, 5))
        self.assertIn("not in the store yet", row["reason"])
        self.assertIn("not in the store yet", self.ctl("status").out)
        self.assertEqual(self.ctl("health").code, 0)  # Readiness is what clients have now.
        self.publish("planner", 5)
        self.in_sync(1)
        self.assertEqual(self.named("planner"), 5)

    def test_a_broken_file_changes_nothing_and_says_the_line(self):
        self.write("planner.stable = 1\n")
        self.begin()
        self.publish("planner", 1)
        self.publish("planner", 2)
        self.in_sync(1)
        for text, why in (("planner.stable = 2\nplanner.canary = x\n", ":2: "),
                          ("planner.stable = 2\nplanner.stable = 2\n", "said in line 1"),
                          ("<html>504 Gateway Time-out</html>\n", ":1: "),
                          ("a = 1\n" * 5000, "line")):
            self.write(text)
            now = wait_for("broken", lambda why=why: (lambda d: d if d["state"] == "broken" and
                                                      why in d["error"] else None)(self.desired()))
            self.assertIn(str(self.file), now["error"])
            self.assertEqual(self.named("planner"), 1)
        self.assertIn("broken", self.ctl("status").out)
        self.write("planner.stable = 2\n")
        self.in_sync(1)
        self.assertEqual(self.named("planner"), 2)

    def test_a_missing_file_and_an_empty_one_are_no_instruction(self):
        self.begin()
        self.publish("planner", 1)
        self.assertEqual(self.desired()["state"], "missing")
        self.write("planner.stable = 1\n")
        self.in_sync(1)
        self.file.unlink()
        wait_for("missing", lambda: self.desired()["state"] == "missing")
        self.assertEqual(self.named("planner"), 1)
        self.write("")
        wait_for("ok", lambda: self.desired()["state"] == "ok")
        self.assertEqual(self.named("planner"), 1)
        self.assertEqual(self.version_row("planner", 1)["state"], "READY")

    def test_a_folder_that_comes_later(self):
        self.conf.rmdir()
        self.begin()
        self.publish("planner", 1)
        self.assertEqual(self.desired()["state"], "missing")
        self.conf.mkdir()
        self.conf.chmod(0o755)
        self.write("planner.stable = 1\n")
        self.in_sync(1)  # By the poll at the latest.

    def test_the_flip_of_a_mounted_config_map(self):
        def volume(number, text):
            folder = self.conf / f"..2026_{number}"
            folder.mkdir()
            folder.chmod(0o755)
            (folder / "models").write_text(text)
            (self.conf / "..data_tmp").symlink_to(folder.name)
            (self.conf / "..data_tmp").rename(self.conf / "..data")
            return folder

        first = volume(1, "planner.stable = 1\n")
        self.file.symlink_to("..data/models")
        self.begin()
        self.publish("planner", 1)
        self.publish("planner", 2)
        self.in_sync(1)
        volume(2, "planner.stable = 2\n")
        (first / "models").unlink()
        first.rmdir()
        wait_for("planner at 2", lambda: self.named("planner") == 2)

    def test_an_edit_in_place_is_seen(self):
        self.write("planner.stable = 1\n")
        self.begin()
        self.publish("planner", 1)
        self.publish("planner", 2)
        self.in_sync(1)
        with open(self.file, "r+", encoding="utf-8") as file:
            file.write("planner.stable = 2\n")
        wait_for("planner at 2", lambda: self.named("planner") == 2)

    @unittest.skipUnless(AS_ROOT, "a file that the daemon's user may not read")
    def test_an_unreadable_file_changes_nothing(self):
        self.write("planner.stable = 1\n")
        self.begin()
        self.publish("planner", 1)
        self.in_sync(1)
        self.write("planner.stable = 2\n", mode=0o600)
        now = wait_for("broken", lambda: (lambda d: d if d["state"] == "broken" else None)(
            self.desired()))
        self.assertIn("ermission denied", now["error"])
        self.assertEqual(self.named("planner"), 1)
        self.write("planner.stable = 1\n", mode=0o666)
        wait_for("writable by all", lambda: "everybody may write" in self.desired()["error"])

    def test_bad_bytes_keep_the_old_version_serving(self):
        self.write("planner.stable = 1\n")
        self.begin()
        self.publish("planner", 1)
        self.publish("planner", 2)
        self.in_sync(1)
        client = self.client()
        client.ok("acquire", ref="planner")
        path = self.daemon.store / "models/planner/versions/2/model.safetensors"
        path.chmod(0o644)
        with open(path, "r+b") as file:
            file.seek(-16, os.SEEK_END)
            file.write(b"\xff" * 8)
        path.chmod(0o444)
        self.write("planner.stable = 2\n")
        row = wait_for("failed", lambda: (lambda r: r if r["state"] == "failed" else None)(
            self.row("planner")))
        self.assertEqual((row["have"], row["drifting"]), (1, False))
        wait_for("quarantined", lambda: "QUARANTINED" in self.row("planner")["reason"])
        self.assertEqual(client.ok("superseded")["superseded"], 0)
        self.assertEqual(self.version_row("planner", 1)["state"], "READY")

    def test_a_manual_swap_is_drift_and_is_brought_back(self):
        self.write("planner.stable = 1\n")
        self.begin()
        self.publish("planner", 1)
        self.publish("planner", 2)
        self.in_sync(1)
        swap = self.ctl("swap", "planner", "--version", "2")
        self.assertRegex(swap.err, r"warning: planner:stable is governed by .*/models, which wants "
                                   r"1: the daemon will bring it back \(change line 1")
        wait_for("brought back", lambda: self.named("planner") == 1)
        self.in_sync(1)
        self.assertIn("event=desired_drift", self.daemon.log.read_text())
        back = self.ctl("swap", "planner", "--version", "1")
        self.assertNotIn("warning", back.err)
        # With the file moved away the operator has the label again.
        self.file.rename(self.conf / "models.off")
        wait_for("missing", lambda: self.desired()["state"] == "missing")
        self.ctl("swap", "planner", "--version", "2")
        self.ctl("rescan")
        self.assertEqual(self.named("planner"), 2)

    def test_a_restart_goes_on_where_the_file_is(self):
        self.write("planner.stable = 1\n")
        self.begin()
        self.publish("planner", 1)
        self.publish("planner", 2)
        self.in_sync(1)
        self.daemon.stop()
        self.write("planner.stable = 2\n")
        self.daemon.start()
        self.in_sync(1)
        self.assertEqual(self.named("planner"), 2)
        self.daemon.kill()
        self.file.unlink()
        self.daemon.start()
        self.assertEqual(self.named("planner"), 2)
        self.assertEqual(self.desired()["state"], "missing")

    def test_a_reload_takes_another_file_or_none(self):
        self.write("planner.stable = 1\n")
        self.begin()
        self.publish("planner", 1)
        self.in_sync(1)
        self.daemon.config_text = ""
        self.daemon.command()
        self.daemon.reload()
        self.assertEqual(self.desired()["state"], "off")
        self.daemon.config_text = f'[desired]\nfile = "{self.file}"\n'
        self.daemon.command()
        self.daemon.reload()
        self.in_sync(1)

    def test_five_hundred_lines(self):
        names = [f"m{i}" for i in range(8)]
        lines = [f"{name}.l{i} = {1 + i % 2}" for name in names for i in range(62)]
        lines += [f"absent{i} = 1" for i in range(4)]
        self.begin()
        for name in names:
            self.publish(name, 1)
            self.publish(name, 2)
        self.write("\n".join(lines) + "\n")
        wait_for("496 in sync", lambda: self.desired()["inSync"] == 496, 120)
        now = self.desired()
        self.assertEqual((now["wanted"], now["pending"], now["failed"]), (500, 4, 0))
        text = self.ctl("status").out
        self.assertIn("496 of 500 labels in sync, 4 pending", text)

    def test_the_script_of_the_document_waits_until_all_is_in_sync(self):
        text = (ROOT / "docs/desired_state.md").read_text()
        self.begin()
        self.write("planner.stable = 8\n")
        wait_for("taken", lambda: self.desired()["wanted"] == 1)
        # The script's own look at the status.
        script = re.search(r"python3 -c '\n(.*?)'", text, re.S).group(1)
        def verdict():
            return subprocess.run(["/usr/bin/python3", "-c", script], check=False,
                                  input=self.ctl("-o", "json", "status").out, text=True).returncode
        self.assertEqual(verdict(), 1)
        self.write("")
        wait_for("nothing wanted", lambda: self.desired()["wanted"] == 0)
        self.assertEqual(verdict(), 0)

    def test_metrics_tell_of_the_file_and_its_labels(self):
        self.write("planner.stable = 1\nplanner.canary = 9\n")
        self.begin(metrics="127.0.0.1:0")
        self.publish("planner", 1)
        wait_for("one in sync", lambda: self.desired()["inSync"] == 1)
        text = self.scrape()
        for line in ('modelhost_desired_file_ok 1',
                     'modelhost_desired_labels{state="in_sync"} 1',
                     'modelhost_desired_labels{state="pending"} 1',
                     'modelhost_desired_labels{state="failed"} 0',
                     'modelhost_desired_drifting_labels 0'):
            self.assertIn(line, text)
        self.assertRegex(text, r'modelhost_swaps_total\{[^}]*trigger="desired"[^}]*\} 1')
        self.assertNotIn("modelhost_desired_last_converged", text)
        self.write("planner.stable = 1\n")
        self.in_sync(1)
        self.assertRegex(self.scrape(),
                         r"modelhost_desired_last_converged_timestamp_seconds \d")
        self.file.unlink()
        wait_for("missing", lambda: self.desired()["state"] == "missing")
        self.assertIn("modelhost_desired_file_ok 0", self.scrape())


if __name__ == "__main__":
    unittest.main()
