"""A store served through a read-only mount of it, in a mount namespace of the daemon's own."""
import errno
import os
import shutil
import subprocess
import tempfile

import harness
import models
from harness import DAEMON, Case, needs_root

WRAPPER = """#!/bin/sh
exec unshare --mount sh -c '
  mount --bind {store} {view} && {protect}
  exec setpriv --reuid={user} --regid={user} --clear-groups --pdeathsig=KILL {program} "$@"' sh "$@"
"""
PROTECT = "mount -o remount,bind,ro {view}"


def mounts_can_be_made():
    if not harness.AS_ROOT or not shutil.which("unshare") or not shutil.which("setpriv"):
        return False
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["unshare", "--mount", "mount", "--bind", folder, folder],
                              capture_output=True, check=False)
    return done.returncode == 0


class View(Case):
    start_daemon = False

    def setUp(self):
        super().setUp()
        if not mounts_can_be_made():
            self.skipTest("no mounts can be made in a namespace of one's own")

    def viewing_daemon(self, protect=PROTECT):
        folder = self.folder / "d"
        folder.mkdir()
        folder.chmod(0o755)
        view = self.folder / "view"
        view.mkdir()
        wrapper = self.folder / "modelhostd"
        wrapper.write_text(WRAPPER.format(store=folder / "store", view=view, user=DAEMON,
                                          protect=protect.format(view=view),
                                          program=harness.PROGRAMS.daemon))
        wrapper.chmod(0o755)
        daemon = harness.Daemon(folder, wait=False, program=wrapper,
                                arguments=["--store-view", str(view)])
        self.addCleanup(self._finish, daemon)
        self.daemon = daemon
        return daemon

    @needs_root
    def test_root_cannot_open_a_descriptor_of_files_again_for_writing(self):
        self.viewing_daemon().start(user=0)
        self.assertEqual(self.json("status")["fileProtection"], "read_only_mount")
        # Published while the daemon runs: seen through the view all the same, sidecars too.
        for version in (1, 2):
            folder = self.source(f"v{version}")
            models.write_safetensors(folder / "model.safetensors", version)
            (folder / "tokenizer.json").write_text(str(version))
            self.publish("planner", version, folder=folder, label="stable")
            client = self.client(user=0)
            client.ok("acquire", ref="planner")
            self.assertEqual(client.ok("seeds")["seeds"], [version])
            for path in ("model.safetensors", "tokenizer.json"):
                for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
                    answer = client.ok("reopen", path=path, flags=flags)
                    self.assertEqual(answer["errno"], 0 if flags == os.O_RDONLY else errno.EROFS,
                                     (path, flags))
        self.ctl("rollback", "planner")

    @needs_root
    def test_without_a_view_only_the_mode_protects_and_status_says_so(self):
        self.daemon = self.new_daemon()
        self.serve("planner", 1)
        self.assertEqual(self.json("status")["fileProtection"], "file_mode")
        root = self.client(user=0)
        root.ok("acquire", ref="planner")
        reopened = root.ok("reopen", path="model.safetensors", flags=os.O_RDWR)
        self.assertEqual(reopened["errno"], 0, "root is not stopped by a mode")
        client = self.client()
        client.ok("acquire", ref="planner")
        reopened = client.ok("reopen", path="model.safetensors", flags=os.O_RDWR)
        self.assertEqual(reopened["errno"], errno.EACCES)

    @needs_root
    def test_a_view_that_may_be_written_to_stops_the_start(self):
        daemon = self.viewing_daemon(protect="true")
        daemon.start(wait_ready=False, user=0)
        daemon.told_to_end = True
        self.assertEqual(daemon.process.wait(harness.DEADLINE_S), 1)
        self.assertIn("store view: ", daemon.log_tail())
        self.assertIn("no read-only mount", daemon.log_tail())
