"""Units, users, container file, packaged configuration: what is installed, checked without installing."""
import fcntl
import os
import pathlib
import re
import shutil
import socket
import subprocess
import tempfile
import unittest

import harness

ROOT = harness.ROOT
UNITS = ["modelhostd.service", "modelhostd-control.socket", "modelhostd-handles.socket"]


class Units(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)

    def test_systemd_accepts_the_units(self):
        if not shutil.which("systemd-analyze"):
            self.skipTest("there is no systemd-analyze")
        for part in ("usr/sbin", "bin", "etc/systemd/system"):
            (self.root / part).mkdir(parents=True)
        for name in ("usr/sbin/modelhostd", "bin/sh"):
            (self.root / name).write_text("#!/bin/sh\n")
            (self.root / name).chmod(0o755)
        for unit in UNITS:
            shutil.copy(ROOT / "systemd" / unit, self.root / "etc/systemd/system")
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", "--recursive-errors=no",
                               f"--root={self.root}", *UNITS], capture_output=True, text=True,
                              check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_the_service_is_hardened(self):
        text = (ROOT / "systemd/modelhostd.service").read_text()
        for line in ("Type=notify", "User=modelhost", "NoNewPrivileges=yes", "ProtectSystem=strict",
                     "CapabilityBoundingSet=", "LimitMEMLOCK=infinity", "RemoveIPC=no",
                     "ReadWritePaths=/var/lib/modelhost /run/modelhost"):
            self.assertIn(line, text.splitlines())

    def test_the_sockets_have_the_names_that_the_daemon_looks_for(self):
        for name in ("control", "handles"):
            text = (ROOT / f"systemd/modelhostd-{name}.socket").read_text()
            self.assertIn(f"FileDescriptorName={name}", text)
            self.assertIn(f"/run/modelhost/{name}.sock", text)
            sources = "".join(path.read_text() for path in (ROOT / "daemon").glob("*.cc"))
            self.assertIn(f'"{name}"', sources)

    def test_users_and_folders(self):
        if not shutil.which("systemd-sysusers") or not shutil.which("systemd-tmpfiles"):
            self.skipTest("there is no systemd-sysusers or systemd-tmpfiles")
        if not harness.AS_ROOT:
            self.skipTest("needs root, to make users in a folder of its own")
        for command in (["systemd-sysusers", f"--root={self.root}",
                         str(ROOT / "systemd/modelhostd.sysusers")],
                        ["systemd-tmpfiles", "--create", f"--root={self.root}",
                         str(ROOT / "systemd/modelhostd.tmpfiles")]):
            if command[0] == "systemd-sysusers":
                (self.root / "etc").mkdir()
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("modelhost-admin:", (self.root / "etc/group").read_text())
        self.assertEqual((self.root / "var/lib/modelhost/store").stat().st_mode & 0o777, 0o700)

    def test_the_packaged_configuration_is_good(self):
        done = subprocess.run([harness.PROGRAMS.daemon, "--config",
                               str(ROOT / "deploy/modelhostd.toml"), "--check-config"],
                              capture_output=True, text=True, check=False,
                              env=harness.environment())
        self.assertEqual(done.returncode, 0, done.stderr)


class SocketActivation(harness.Case):
    """The daemon takes sockets from systemd; this test plays systemd."""

    start_daemon = False

    def test_inherited_sockets_are_served(self):
        daemon = harness.Daemon(self.folder, wait=False)
        listeners = []
        for name, kind in (("control", socket.SOCK_STREAM), ("handles", socket.SOCK_SEQPACKET)):
            listener = socket.socket(socket.AF_UNIX, kind)
            listener.bind(str(daemon.runtime / f"{name}.sock"))
            (daemon.runtime / f"{name}.sock").chmod(0o666)
            listener.listen(16)
            listeners.append(listener)
        # A shell is the process that sets its own pid as LISTEN_PID and becomes the daemon.
        fds = [fcntl.fcntl(listener, fcntl.F_DUPFD, 20) for listener in listeners]
        script = (f"exec 3<&{fds[0]} 4<&{fds[1]} {fds[0]}<&- {fds[1]}<&-; "
                  'export LISTEN_PID=$$; exec "$@"')
        notify = self.folder / "notify.sock"
        daemon.notify = harness.Notifications(notify)
        log = open(daemon.log, "ab")
        self.addCleanup(log.close)
        command = daemon.command()
        daemon.process = subprocess.Popen(
            ["/bin/bash", "-c", script, "bash", *command], pass_fds=fds, stdout=log, stderr=log,
            cwd="/", env=harness.environment(NOTIFY_SOCKET=str(notify), LISTEN_FDS="2",
                                             LISTEN_FDNAMES="control:handles"),
            **harness.as_user(harness.DAEMON))
        self.addCleanup(self._finish, daemon)
        daemon.wait_ready()
        for listener, fd in zip(listeners, fds):
            listener.close()
            os.close(fd)
        self.daemon = daemon
        self.serve("planner", 1)
        client = self.client()
        client.ok("acquire", ref="planner")
        self.assertEqual(client.ok("seeds")["seeds"], [1])
        self.assertEqual(daemon.stop(), 0)
        self.assertTrue((daemon.runtime / "control.sock").exists(),
                        "a socket of systemd is not the daemon's to remove")


class Container(unittest.TestCase):
    def setUp(self):
        self.text = (ROOT / "Dockerfile").read_text()

    def test_two_stages_and_no_root(self):
        stages = re.findall(r"(?m)^FROM (\S+)", self.text)
        self.assertEqual(len(stages), 2)
        for image in stages:
            self.assertIn(":", image, "images are pinned to a tag")
            self.assertFalse(image.endswith(":latest"))
        users = re.findall(r"(?m)^USER (\S+)", self.text)
        self.assertTrue(users)
        self.assertNotIn(users[-1], ("root", "0"))

    def test_what_it_copies_is_there(self):
        for line in re.findall(r"(?m)^COPY (?!--from)(.+)$", self.text):
            for source in line.split()[:-1]:
                self.assertTrue((ROOT / source).exists(), source)

    def test_the_run_stage_has_every_library_that_the_programs_need(self):
        if not shutil.which("dpkg") or not shutil.which("ldd"):
            self.skipTest("there is no dpkg")
        packages = set(re.findall(r"(lib[a-z0-9+.-]+|zlib1g)", self.text.split("FROM")[2]))
        wanted = set()
        for program in (harness.PROGRAMS.build / "bin/modelhostd", harness.PROGRAMS.build / "bin/modelctl"):
            done = subprocess.run(["readelf", "-d", str(program)], capture_output=True, text=True,
                                  check=True)
            wanted |= set(re.findall(r"NEEDED.*\[(.+)\]", done.stdout))
        for library in sorted(wanted):
            if library.startswith(("libc.", "libm.", "libstdc++", "libgcc_s", "ld-linux",
                                   "libmodelhost", "libasan", "libubsan", "libtsan")):
                continue
            with self.subTest(library):
                found = subprocess.run(["dpkg", "-S", f"*/{library}"], capture_output=True, text=True,
                                       check=False).stdout
                owners = {line.split(":")[0] for line in found.splitlines()}
                self.assertTrue(owners & packages, f"{library} of {owners} is not in the run stage")


class Library(unittest.TestCase):
    def test_libmodelhost_links_nothing_but_the_c_and_cxx_runtime(self):
        done = subprocess.run(["readelf", "-d", harness.PROGRAMS.library], capture_output=True,
                              text=True, check=True)
        needed = re.findall(r"NEEDED.*\[(.+)\]", done.stdout)
        if harness.PROGRAMS.sanitized:
            self.skipTest("a sanitizer's run-time is linked in")
        for library in needed:
            self.assertRegex(library, r"^(libc|libm|libstdc\+\+|libgcc_s|ld-linux-x86-64|ld-linux-aarch64)\.")

    def test_libmodelhost_exports_mh_names_only(self):
        done = subprocess.run(["nm", "-D", "--defined-only", harness.PROGRAMS.library],
                              capture_output=True, text=True, check=True)
        names = [line.split()[-1].split("@")[0] for line in done.stdout.splitlines()
                 if line.split()[-2] in "TDBRWVu"]
        self.assertTrue(names)
        self.assertEqual([name for name in names if not name.startswith("mh_")], [])


if __name__ == "__main__":
    unittest.main()
