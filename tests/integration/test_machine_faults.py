"""The machine runs out of something, or lies: disks, descriptors, memory, clocks, pids, namespaces.

Most cases need root and a kernel that lets them; each says what it lacks when it is skipped."""
import ctypes
import ctypes.util
import json
import os
import pathlib
import shutil
import signal
import subprocess
import time
import unittest

import frames
import harness
import models
from harness import (CLIENT, DAEMON, EXIT_OLD_SERVES, EXIT_RESOURCES, PROGRAMS, READERS, Case, Client,
                     footprint, needs_root, wait_for)

MIB = 1 << 20
CGROUPS = pathlib.Path("/sys/fs/cgroup/memory")  # Version 1; version 2 has memory.max in its root.


def command(*words, check=True):
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, check=check)


class Mounted(Case):
    """A small file system of its own for the store, or for what a test says."""

    start_daemon = False

    def mount(self, name, *arguments):
        place = self.folder / name
        place.mkdir(exist_ok=True)
        done = command("mount", *arguments, place, check=False)
        if done.returncode != 0:
            self.skipTest(f"nothing can be mounted here: {done.stderr.strip()}")
        self.addCleanup(command, "umount", "-l", place, check=False)
        os.chown(place, DAEMON, DAEMON)
        place.chmod(0o700)
        return place

    def small(self, name, mib):
        return self.mount(name, "-t", "tmpfs", "-o", f"size={mib}m", "none")

    def fill(self, place):
        """Leaves no byte free; the path of what takes it all."""
        path = place / "ballast"
        with open(path, "wb") as out:
            try:
                while True:
                    out.write(b"\0" * 65536)
            except OSError:
                pass
        with open(path, "ab", buffering=0) as out:
            try:
                while True:
                    out.write(b"\0" * 512)
            except OSError:
                pass
        return path


@needs_root
class DiskFull(Mounted):
    def test_a_publish_that_does_not_fit_is_refused_and_leaves_nothing(self):
        store = self.small("store", 8)
        self.daemon = self.new_daemon(store=store)
        self.serve("planner", 1)
        folder = models.simple_model(self.folder / "big", 2, tensors=4, tensor_bytes=4 * MIB)
        self.give(folder)
        result = self.ctl("publish", folder, "--model", "planner", "--version", "2", expect=EXIT_RESOURCES)
        self.assertRegex(result.err, r"space|free|ENOSPC|bytes")
        # Nothing staged is left, so what fits goes in.
        wait_for("the staging to be gone", lambda: not list((store / "incoming").iterdir()))
        # It fills up in the middle, where nobody could know it before.
        ballast = self.fill(store)
        self.ctl("publish", models.simple_model(self.folder / "small", 3) and self.give(
            self.folder / "small"), "--model", "planner", "--version", "3", expect=EXIT_RESOURCES)
        ballast.unlink()
        self.publish("planner", 4)
        self.ctl("swap", "planner", "--version", "4")
        client = self.client()
        self.assertEqual(client.ok("acquire", ref="planner")["version"], 4)

    def test_labels_that_cannot_be_written_do_not_move(self):
        state = self.small("d/state", 1) if (self.folder / "d").mkdir() is None else None
        self.daemon = self.new_daemon(name="d")
        self.serve("planner", 1)
        self.publish("planner", 2)
        self.ctl("load", "planner@2")
        client = self.client()
        client.ok("acquire", ref="planner")
        ballast = self.fill(state)
        result = self.ctl("swap", "planner", "--version", "2", expect=EXIT_OLD_SERVES)
        self.assertIn("space", result.err)
        self.assertEqual(client.ok("superseded")["superseded"], 0)
        self.assertEqual(client.ok("acquire", ref="planner", key="b")["version"], 1)
        # Status is the truth, and stays it over a crash.
        self.ctl("status")
        self.daemon.kill()
        ballast.unlink()
        self.daemon.start()
        wait_for("the label's version", lambda: self.version_row("planner", 1)["state"] == "READY")
        self.ctl("swap", "planner", "--version", "2")
        wait_for("the move", lambda: client.ok("superseded")["superseded"] == 1)

    def test_operations_go_on_without_a_journal_and_are_written_down_later(self):
        (self.folder / "d").mkdir()
        state = self.small("d/state", 1)
        self.daemon = self.new_daemon(name="d")
        self.publish("planner", 1)
        ballast = self.fill(state)

        def refused():
            self.ctl("load", "planner@1")  # The page that the file ends in takes a few.
            return "event=journal" in self.daemon.log.read_text()
        wait_for("the journal to find no room", refused)
        operation = next(row["id"] for row in self.json("ops", "ls")["items"]
                         if row["operationKind"] == "load")
        ballast.unlink()
        journal = state / "operations.jsonl"

        def written_down():
            """Whole, and no line torn: a failed write is followed by one of the whole file."""
            try:
                records = [json.loads(line) for line in journal.read_text().splitlines()]
            except ValueError:
                return False
            return any(f"op-{record.get('id')}" == operation and "finished" in record
                       for record in records)
        wait_for("the journal", written_down)
        self.daemon.kill()
        self.daemon.start()
        shown = self.json("ops", "show", operation)
        self.assertEqual((shown["operationKind"], shown["state"]), ("load", "succeeded"))

    def test_a_store_on_a_read_only_file_system_is_served(self):
        store = self.folder / "store"
        self.daemon = self.new_daemon(store=store)
        self.serve("planner", 1)
        self.daemon.stop()
        command("mount", "--bind", store, store)
        self.addCleanup(command, "umount", "-l", store, check=False)
        command("mount", "-o", "remount,bind,ro", store)
        self.daemon.start()
        client = self.client()
        self.assertEqual(client.ok("acquire", ref="planner")["version"], 1)
        folder = self.give(models.simple_model(self.folder / "two", 2))
        result = self.daemon.ctl("publish", folder, "--model", "planner", "--version", "2")
        self.assertNotIn(result.code, (0, harness.EXIT_OTHER), str(result))
        self.assertRegex(result.err, "[Rr]ead-only")
        self.assertEqual(client.ok("seeds")["seeds"], [1])


@needs_root
class BrokenDisk(Mounted):
    def test_a_block_that_cannot_be_read_fails_one_load_and_names_the_file(self):
        """EIO from a real block layer: the far end of the loop device's file is cut off."""
        image = self.folder / "image"
        with open(image, "wb") as out:
            out.truncate(96 * MIB)
        if command("mkfs.ext4", "-q", "-E", "nodiscard,lazy_itable_init=0", image, check=False).returncode:
            self.skipTest("there is no mkfs.ext4")
        store = self.mount("store", "-o", "loop", image)
        shutil.rmtree(store / "lost+found")
        self.daemon = self.new_daemon(store=store)
        self.serve("planner", 1)
        self.publish("big", 1, tensors=8, tensor_bytes=8 * MIB)
        path = store / "models/big/versions/1/model.safetensors"
        command("sync", "-f", store)
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.truncate(image, 48 * MIB)
        os.utime(path)  # To be read, whatever was known of it.
        first = self.daemon.ctl("load", "big@1")
        second = self.daemon.ctl("load", "big@1")
        for result in (first, second):
            self.assertEqual(result.code, harness.EXIT_INTEGRITY, str(result))
            self.assertIn("model.safetensors", result.err)
        self.assertNotEqual(self.version_row("big", 1)["state"], "READY")
        client = self.client()
        client.ok("acquire", ref="planner")
        self.assertEqual(client.ok("seeds")["seeds"], [1])
        self.daemon.check_alive()


class OutOfDescriptors(Case):
    def limit(self, pid, value):
        """Sets the limit of a running process, as its own user; what it was."""
        def prlimit(*words):
            return subprocess.run(["prlimit", "--pid", str(pid), *words], check=True, text=True,
                                  stdout=subprocess.PIPE, **harness.as_user(DAEMON)).stdout.strip()
        before = prlimit("--nofile", "-o", "SOFT", "--noheadings")
        prlimit(f"--nofile={value}")
        return before

    def test_it_says_so_serves_who_is_connected_and_recovers(self):
        self.serve("planner", 1)
        self.publish("planner", 2)
        self.ctl("load", "planner@2")
        client = self.client()
        client.ok("acquire", ref="planner")
        pid = self.daemon.process.pid
        # A limit on the process (EMFILE); ENFILE takes the same way through the daemon (ErrnoStatus).
        highest = max(int(fd) for fd in os.listdir(f"/proc/{pid}/fd") if int(fd) < 512)
        before = self.limit(pid, f"{highest + 1}:")
        # Whatever is free below that number is taken by connections that say nothing.
        crowd = []
        try:
            for _ in range(highest + 8):
                with harness.as_peer(CLIENT):
                    crowd.append(frames.RawClient(self.daemon.handles_socket))
            wait_for("it to say so",
                     lambda: "event=accept socket=handles" in self.daemon.log.read_text())
            # Who is connected goes on; what needs no descriptor works.
            self.assertEqual(client.ok("seeds")["seeds"], [1])
            self.assertEqual(client.ok("superseded")["superseded"], 0)
        finally:
            self.limit(pid, f"{before}:")
            for peer in crowd:
                peer.close()
        self.ctl("swap", "planner", "--version", "2")
        client.ok("acquire", ref="planner", key="b")
        self.assertEqual(client.ok("seeds", key="b")["seeds"], [2])
        log = self.daemon.log.read_text()
        self.assertLess(len(log), 4 * MIB, "it says so, but not without end")


@needs_root
class Namespaces(Case):
    start_daemon = False

    def wrapped(self, name, script):
        """A daemon that root starts by a script, which hands over to it with `as_daemon "$@"`."""
        path = self.folder / f"{name}.sh"
        path.write_text(f"#!/bin/sh\nset -e\nas_daemon() {{ exec setpriv --reuid {DAEMON} --regid {DAEMON} "
                        f"--clear-groups --pdeathsig KILL {PROGRAMS.daemon} \"$@\"; }}\n{script}\n")
        path.chmod(0o755)
        folder = self.folder / name
        folder.mkdir()
        folder.chmod(0o755)
        daemon = harness.Daemon(folder, wait=False, program=path,
                                config='[[models]]\nname = "planner"\nresidency = "sealed"\n')
        self.addCleanup(self._finish, daemon)
        return daemon

    def start_as_root(self, daemon):
        daemon.start(user=0)
        self.daemon = daemon

    def test_a_full_dev_shm_disturbs_nobody(self):
        """memfds do not live there. Shown with one of 4 KiB that is full, in a mount namespace."""
        script = ('if [ "$MODELHOST_INNER" != 1 ]; then MODELHOST_INNER=1 exec unshare -m "$0" "$@"; fi\n'
                  'mount -t tmpfs -o size=4k none /dev/shm\n'
                  'dd if=/dev/zero of=/dev/shm/full bs=4096 count=2 2>/dev/null || true\nas_daemon "$@"')
        self.start_as_root(self.wrapped("shm", script))
        shm = pathlib.Path(f"/proc/{self.daemon.process.pid}", "root", "dev", "shm")
        self.assertEqual(os.statvfs(shm).f_bavail, 0)
        self.serve("planner", 1)
        client = self.client()
        client.ok("acquire", ref="planner")
        self.assertEqual(client.ok("seeds")["seeds"], [1])
        self.assertEqual(self.version_row("planner", 1)["residency"], "sealed")

    def cgroup(self, name, mib):
        if not (CGROUPS / "memory.limit_in_bytes").exists() and not CGROUPS.is_dir():
            self.skipTest("there is no memory control group of version 1 here")
        group = CGROUPS / f"modelhost-test-{os.getpid()}-{name}"
        try:
            group.mkdir()
            (group / "memory.limit_in_bytes").write_text(str(mib * MIB))
        except OSError as error:
            self.skipTest(f"no control group can be made: {error}")

        def remove():
            wait_for("the group to be empty", lambda: not (group / "cgroup.procs").read_text())
            group.rmdir()
        self.addCleanup(remove)
        return group

    def test_a_control_group_that_is_full_refuses_the_load_with_the_numbers(self):
        group = self.cgroup("daemon", 128)
        daemon = self.wrapped("limited", f'echo $$ > {group}/cgroup.procs\nas_daemon "$@"')
        self.start_as_root(daemon)
        self.serve("planner", 1)
        self.publish("planner", 2, tensors=4, tensor_bytes=40 * MIB)
        result = self.ctl("load", "planner@2", expect=EXIT_RESOURCES)
        self.assertRegex(result.err, r"\d")
        client = self.client()
        client.ok("acquire", ref="planner")
        self.assertEqual(client.ok("seeds")["seeds"], [1])

    def test_a_client_that_is_killed_for_memory_loses_its_lease_and_nobody_else_notices(self):
        group = self.cgroup("client", 64)
        self.daemon = self.new_daemon()
        self.serve("planner", 1)
        stays = self.client()
        stays.ok("acquire", ref="planner")
        client = self.client()
        client.ok("acquire", ref="planner")
        self.wait_leases(2)
        (group / "cgroup.procs").write_text(str(client.pid))
        client.begin("eat", nbytes=256 * MIB)
        self.assertEqual(client.process.wait(harness.DEADLINE_S), -signal.SIGKILL)
        self.assertRegex((group / "memory.oom_control").read_text(), "oom_kill [1-9]")
        self.wait_leases(1)
        self.assertEqual(stays.ok("seeds")["seeds"], [1])

    def test_a_client_in_other_namespaces_reads_the_same_bytes(self):
        self.daemon = self.new_daemon()
        self.serve("planner", 1)
        prefix = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "setpriv", "--reuid", str(CLIENT),
                  "--regid", str(CLIENT), "--groups", str(READERS)]
        client = Client(self.daemon, prefix=prefix)
        self.addCleanup(client.close)
        self.assertEqual(client.ok("pid")["pid"], 1, "it is in a pid namespace of its own")
        client.ok("acquire", ref="planner")
        self.assertEqual(client.ok("seeds")["seeds"], [1])
        row = self.json("leases")["items"][0]
        self.assertEqual(row["uid"], CLIENT)
        self.assertNotEqual(row["pid"], 1, "the pid is the one that the daemon's side knows")
        client.kill()
        self.wait_leases(0)

    def test_a_new_process_with_the_pid_of_a_dead_one_inherits_nothing(self):
        """In a pid namespace whose next pid can be said."""
        self.daemon = self.new_daemon()
        self.serve("planner", 1)
        script = (
            "import os, subprocess, sys, json\n"
            "def start():\n"
            "    # The next pid is said again and again: only children of this process use any.\n"
            "    try:\n"
            "        open('/proc/sys/kernel/ns_last_pid', 'w').write('499')\n"
            "    except OSError as error:\n"
            "        print(error, file=sys.stderr); sys.exit(77)\n"
            "    p = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)\n"
            "    if p.pid != 500:\n"
            "        print('it got pid', p.pid, file=sys.stderr); p.kill(); sys.exit(77)\n"
            "    return p\n"
            "def call(p, **what):\n"
            "    p.stdin.write(json.dumps(what) + '\\n'); p.stdin.flush()\n"
            "    answer = json.loads(p.stdout.readline()); assert answer['ok'], answer; return answer\n"
            "first = start()\n"
            "call(first, do='connect'); call(first, do='acquire', ref='planner')\n"
            "print('held', flush=True); sys.stdin.readline()\n"
            "first.kill(); first.wait()\n"
            "second = start(); call(second, do='connect')\n"
            "print('again', flush=True); sys.stdin.readline()\n"
            "second.kill(); second.wait()\n")
        worker = ["setpriv", "--reuid", str(CLIENT), "--regid", str(CLIENT), "--groups", str(READERS),
                  "/usr/bin/python3", "-B", str(PROGRAMS.scripts / "worker.py"), PROGRAMS.library,
                  str(self.daemon.runtime)]
        process = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "/usr/bin/python3", "-c", script,
             *worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=harness.environment(), cwd="/", preexec_fn=harness.end_with_us)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        line = process.stdout.readline()
        if not line:
            text = process.stderr.read()
            if process.wait(harness.DEADLINE_S) == 77 or text.startswith("unshare: "):
                self.skipTest(f"pids cannot be chosen here: {text.strip()}")
            self.fail(text)
        first = self.json("leases")["items"]
        self.assertEqual(len(first), 1)
        process.stdin.write("\n")
        process.stdin.flush()
        self.assertEqual(process.stdout.readline(), "again\n")
        self.wait_leases(0)
        clients = wait_for("the second client", lambda: self.json("clients")["items"])
        self.assertEqual(len(clients), 1)
        self.assertEqual(clients[0].get("leases", []), [])


class Stopped(Case):
    def test_a_client_that_is_stopped_for_long_holds_up_no_swap(self):
        self.serve("planner", 1)
        self.publish("planner", 2)
        client = self.client()
        client.ok("follow", ref="planner")
        os.kill(client.pid, signal.SIGSTOP)
        try:
            for version in (2, 1) * 10:
                self.ctl("swap", "planner", "--version", version)
            other = self.client()
            other.ok("acquire", ref="planner")
            self.assertEqual(other.ok("seeds")["seeds"], [1])
            other.close()
            # Its lease stands: nothing is taken from who merely sleeps.
            self.wait_leases(1)
        finally:
            os.kill(client.pid, signal.SIGCONT)
        wait_for("it to catch up", lambda: client.ok("adopt")["version"] == 1)


class Clock(Case):
    start_daemon = False

    def test_a_clock_that_jumps_neither_frees_nor_keeps_anything(self):
        library = ctypes.util.find_library("faketime") or next(iter(
            map(str, pathlib.Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)
        if library is None:
            self.skipTest("there is no libfaketime (deploy/install-deps --test)")
        stamp = self.folder / "time"

        def say(offset):
            new = self.folder / "time.new"
            new.write_text(f"{offset}\n")
            new.chmod(0o644)
            new.rename(stamp)
        say("+0")
        self.daemon = self.new_daemon(
            config='[[models]]\nname = "planner"\nkeep_previous = "10m"\n',
            env={"LD_PRELOAD": library, "FAKETIME_TIMESTAMP_FILE": str(stamp), "FAKETIME_NO_CACHE": "1",
                 "DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1"})
        self.serve("planner", 1)
        self.publish("planner", 2)
        self.ctl("swap", "planner", "--version", "2")
        client = self.client()
        client.ok("acquire", ref="planner")
        for offset in ("+400d", "-400d", "+0"):
            say(offset)
            time.sleep(0.05)  # For the wall clock to be looked at again; nothing depends on it.
            self.ctl("status")
            # keep_previous is ten minutes of real time: version 1 is there, and a rollback immediate.
            self.assertEqual(self.version_row("planner", 1)["state"], "READY", offset)
            self.ctl("rollback", "planner")
            self.ctl("rollback", "planner")
            self.publish("planner", 10 + len(offset) + (offset[0] == "-"), seed=7)
            self.wait_leases(1)
        text = self.daemon.log.read_text()
        self.assertGreater(len({line[3:7] for line in text.splitlines()}), 1, "the clock did jump")


if __name__ == "__main__":
    unittest.main()
