"""Getting versions into the store: safely, whole, and without rights on it."""
import json
import os
import pathlib
import shutil
import stat
import subprocess
import unittest

import models
from harness import (AS_ROOT, DAEMON, EXIT_CONFLICT, EXIT_INTEGRITY, EXIT_NOT_FOUND, EXIT_PERMISSION,
                     EXIT_RESOURCES, CLIENT, OPERATOR, Case, needs_root, smoke, wait_for)


class Publish(Case):
    def version_folder(self, model, version):
        return self.daemon.store / "models" / model / "versions" / str(version)

    @smoke
    def test_a_published_version_is_complete_and_closed_to_writing(self):
        source = self.publish("planner", 1)
        folder = self.version_folder("planner", 1)
        names = sorted(path.name for path in folder.iterdir())
        self.assertEqual(names, ["config.json", "manifest.json", "model.safetensors",
                                 "tokenizer.json"])
        self.assertEqual(stat.S_IMODE(folder.stat().st_mode), 0o555)
        for path in folder.iterdir():
            self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o444, path.name)
        manifest = json.loads((folder / "manifest.json").read_text())
        files = {row["path"]: row for row in manifest["files"]}
        weights = files["model.safetensors"]
        self.assertEqual(weights["sha256"], models.sha256(source / "model.safetensors"))
        self.assertEqual(weights["size"], (source / "model.safetensors").stat().st_size)
        self.assertTrue(weights["chunk_sha256"])
        self.assertEqual((folder / "model.safetensors").read_bytes(),
                         (source / "model.safetensors").read_bytes())

    @needs_root
    def test_the_operator_needs_no_rights_on_the_store_and_the_daemon_none_on_the_source(self):
        source = self.publish("planner", 1)
        for path, uid in [(source / "model.safetensors", DAEMON), (self.daemon.store, OPERATOR)]:
            probe = subprocess.run(["/usr/bin/test", "-r", str(path)], user=uid, group=uid,
                                   extra_groups=[], check=False)
            self.assertEqual(probe.returncode, 1, f"uid {uid} can read {path}")
        self.assertEqual(self.version_folder("planner", 1).stat().st_uid, DAEMON)

    @needs_root
    def test_publishing_needs_admin_rights(self):
        source = self.give(models.simple_model(self.folder / "mine", 1), CLIENT)
        self.ctl("publish", source, "--model", "planner", "--version", "1", user=CLIENT,
                 expect=EXIT_PERMISSION)
        self.assertFalse(self.version_folder("planner", 1).exists())

    def test_the_same_number_with_other_bytes_is_a_conflict(self):
        self.publish("planner", 1)
        before = models.sha256(self.version_folder("planner", 1) / "model.safetensors")
        other = self.give(models.simple_model(self.folder / "other", 2))
        result = self.ctl("publish", other, "--model", "planner", "--version", "1",
                          expect=EXIT_CONFLICT)
        self.assertIn("planner@1", result.err)
        self.assertEqual(models.sha256(self.version_folder("planner", 1) / "model.safetensors"),
                         before)

    def test_a_file_that_the_store_has_already_is_linked(self):
        self.publish("planner", 1, folder=models.write_sharded(self.folder / "a", [1, 2]))
        self.publish("planner", 2, folder=models.write_sharded(self.folder / "b", [1, 3]))
        first, second = self.version_folder("planner", 1), self.version_folder("planner", 2)
        shared, own = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
        self.assertTrue(os.path.samefile(first / shared, second / shared))
        self.assertFalse(os.path.samefile(first / own, second / own))

    def test_a_single_file_is_a_version_too(self):
        path = models.write_gguf(self.folder / "speech.gguf", 3)
        path.chmod(0o600)
        if AS_ROOT:
            os.chown(path, OPERATOR, OPERATOR)
        self.ctl("publish", path, "--model", "speech", "--version", "3", "--label", "stable")
        client = self.client()
        client.ok("acquire", ref="speech", wait=True)
        self.assertEqual(client.ok("seeds")["seeds"], [3])

    def test_checksums_are_honoured(self):
        good = models.simple_model(self.folder / "good", 1)
        models.write_checksums(good)
        self.publish("planner", 1, folder=good)
        bad = models.simple_model(self.folder / "bad", 2)
        models.write_checksums(bad)
        models.write_safetensors(bad / "model.safetensors", 3)
        self.give(bad)
        result = self.ctl("publish", bad, "--model", "planner", "--version", "2",
                          expect=EXIT_INTEGRITY)
        self.assertIn("model.safetensors", result.err)
        self.assertFalse(self.version_folder("planner", 2).exists())

    def test_a_dry_run_changes_nothing(self):
        source = self.give(models.simple_model(self.folder / "dry", 1))
        self.ctl("publish", source, "--model", "planner", "--version", "1", "--dry-run")
        self.assertFalse((self.daemon.store / "models" / "planner").exists())

    def test_what_may_not_be_in_a_version_is_refused_by_name(self):
        def link_out(folder):
            (folder / "escape.json").symlink_to("/etc/hostname")

        def fifo(folder):
            os.mkfifo(folder / "pipe")

        for name, spoil in [("escape.json", link_out), ("pipe", fifo)]:
            with self.subTest(name):
                source = models.simple_model(self.folder / f"bad-{name}", 1)
                spoil(source)
                if AS_ROOT:
                    for path in [source, *source.iterdir()]:
                        os.chown(path, OPERATOR, OPERATOR, follow_symlinks=False)
                result = self.daemon.ctl("publish", source, "--model", "planner", "--version", "1")
                self.assertNotEqual(result.code, 0, str(result))
                self.assertIn(name, result.err)
                self.assertFalse(self.version_folder("planner", 1).exists())

    def test_a_directory_moved_into_place_is_found_by_rescan(self):
        self.place_by_hand("planner", 4, self.folder / "away")
        # The watch may have found it before: what counts is that it is there afterwards.
        answer = self.json("rescan")
        self.assertEqual((answer["versions"], answer["invalid"]), (1, 0), answer)
        self.assertEqual(self.version_row("planner", 4)["state"], "STAGED")
        self.ctl("swap", "planner", "--version", "4")
        client = self.client()
        client.ok("acquire", ref="planner")
        self.assertEqual(client.ok("seeds")["seeds"], [4])

    def test_a_directory_moved_into_place_is_found_without_rescan(self):
        self.publish("planner", 1)
        self.place_by_hand("planner", 2, self.folder / "away")
        wait_for("the watch to find planner@2", lambda: any(
            row["version"] == 2 for row in self.json("versions", "planner", "--all")["items"]))

    def place_by_hand(self, model, version, folder):
        source = models.simple_model(folder, version)
        versions = self.daemon.store / "models" / model / "versions"
        versions.mkdir(parents=True, exist_ok=True)
        staged = self.daemon.store / "incoming" / "by-hand.partial"
        staged.parent.mkdir(exist_ok=True)
        shutil.copytree(source, staged)
        for path in [staged, *staged.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o444)
        if AS_ROOT:
            for path in [*versions.parents, versions, staged, staged.parent, *staged.rglob("*")]:
                if path.is_relative_to(self.daemon.store):
                    os.chown(path, DAEMON, DAEMON)
        staged.rename(versions / str(version))

    def test_wrong_entries_are_listed_with_a_reason_and_never_loaded(self):
        self.publish("planner", 1)
        versions = self.daemon.store / "models" / "planner" / "versions"
        for name in ("007", "v2"):
            (versions / name).mkdir()
            if AS_ROOT:
                os.chown(versions / name, DAEMON, DAEMON)
        self.ctl("rescan")
        rows = {row["name"]: row for row in self.json("versions", "planner", "--all")["items"]}
        for name in ("007", "v2"):
            self.assertEqual(rows[name]["state"], "INVALID", rows)
            self.assertTrue(rows[name]["reason"], rows[name])

    def test_a_daemon_killed_while_publishing_leaves_no_half_version(self):
        source = self.give(models.simple_model(self.folder / "big", 1, tensors=8,
                                               tensor_bytes=8 << 20))
        publishing = self.daemon.ctl_start("publish", source, "--model", "planner", "--version", "1")
        wait_for("staging to begin", lambda: list((self.daemon.store / "incoming").glob("*")) or
                 publishing.poll() is not None)
        self.daemon.kill()
        publishing.communicate(timeout=60)
        self.daemon.start()
        folder = self.version_folder("planner", 1)
        if folder.exists():  # It was quicker than the signal: then it is whole.
            self.assertTrue((folder / "manifest.json").is_file())
        else:
            self.publish("planner", 1, folder=source)
        self.ctl("load", "planner@1")

    def test_publishing_the_bytes_of_a_quarantined_version_again_repairs_it(self):
        source = self.publish("planner", 1)
        path = self.version_folder("planner", 1) / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        path.chmod(0o644)
        path.write_bytes(data)
        path.chmod(0o444)
        self.ctl("load", "planner@1", expect=EXIT_INTEGRITY)
        self.assertEqual(self.version_row("planner", 1)["state"], "QUARANTINED")
        self.publish("planner", 1, folder=source)
        self.ctl("load", "planner@1")
        self.assertEqual(self.version_row("planner", 1)["state"], "READY")

    def test_unknown_versions_are_not_found(self):
        self.publish("planner", 1)
        self.ctl("load", "planner@2", expect=EXIT_NOT_FOUND)
        result = self.ctl("swap", "planer", "--version", "1", expect=EXIT_NOT_FOUND)
        self.assertIn("planner", result.err, "the near name is offered")


class SmallStore(Case):
    """Stores on file systems that say no."""

    start_daemon = False

    def mount(self, options):
        if not AS_ROOT:
            self.skipTest("needs root, to mount a small file system")
        point = self.folder / "mnt"
        point.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(point)], check=False,
                          capture_output=True).returncode != 0:
            self.skipTest("no file system may be mounted here")
        self.addCleanup(subprocess.run, ["umount", "-l", str(point)], check=False)
        os.chown(point, DAEMON, DAEMON)
        return point

    def test_no_space_fails_the_publish_and_leaves_nothing_behind(self):
        point = self.mount("size=8m")
        self.daemon = self.new_daemon(store=point / "store")
        self.serve("planner", 1)
        big = self.give(models.simple_model(self.folder / "big", 2, tensors=2,
                                            tensor_bytes=8 << 20))
        result = self.ctl("publish", big, "--model", "planner", "--version", "2",
                          expect=EXIT_RESOURCES)
        self.assertRegex(result.err, r"(?i)space|free")
        self.assertEqual([row["version"] for row in self.json("versions", "planner", "--all")["items"]],
                         [1])
        incoming = point / "store" / "incoming"
        wait_for("staging to be cleared", lambda: not list(incoming.glob("*")))
        client = self.client()
        client.ok("acquire", ref="planner")
        self.assertEqual(client.ok("seeds")["seeds"], [1])

    def test_a_read_only_store_serves_and_takes_nothing_in(self):
        point = self.mount("size=64m")
        first = self.new_daemon(store=point / "store")
        self.daemon = first
        self.serve("planner", 1)
        first.stop()
        subprocess.run(["mount", "-o", "remount,ro", str(point)], check=True)
        first.start()
        source = self.give(models.simple_model(self.folder / "two", 2))
        result = self.daemon.ctl("publish", source, "--model", "planner", "--version", "2")
        self.assertNotEqual(result.code, 0, str(result))
        self.assertRegex(result.err, r"(?i)read-only")
        client = self.client()
        client.ok("acquire", ref="planner", wait=True)
        self.assertEqual(client.ok("seeds")["seeds"], [1])


if __name__ == "__main__":
    unittest.main()
