"""The packaged service on a booted systemd: what the units promise, each tried on the real thing.

One machine for all cases; each brings the service to where it starts from. In the machine are the
users reader (of the group modelhost), operator (of modelhost-admin too) and stranger.
"""
import json
import os
import re
import unittest

import harness
import machine
import models
import tree

DEADLINE_S = 120.0 * float(os.environ.get("MODELHOST_TEST_SLOW", "1"))
UNIT = "modelhostd.service"
SOCKETS = ["modelhostd-control.socket", "modelhostd-handles.socket"]
LIBRARY = "/usr/lib/libmodelhost.so.1"
RUNTIME = "/run/modelhost"
FILES = "/" + machine.TEST_FILES
REQUIRED = '\n[[models]]\nname = "gate"\nrequired = true\nresidency = "{residency}"\n'
# What a restart may read in all: programs, labels, manifests, headers of files. No weights.
MOST_READ_AT_RESTART = 16 << 20
MOST_EXPOSURE = 2.0

HOST = None  # The machine; set by setUpModule.


def setUpModule():
    global HOST
    try:
        machine.check()
        HOST = machine.Machine(harness.PROGRAMS.build)
    except tree.Unavailable as why:
        raise unittest.SkipTest(str(why)) from None


def tearDownModule():
    if HOST is not None:
        HOST.close()


def large_model_bytes():
    """A quarter of the memory, at most 1 GiB, in whole MiB: what stands for 16 GiB here."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(memory // 4, 1 << 30) >> 20 << 20


class Client:
    """worker.py in the machine, as one of its users."""

    def __init__(self, user):
        self.process = HOST.start("python3", f"{FILES}/worker.py", LIBRARY, RUNTIME, user=user)

    def call(self, verb, **arguments):
        self.process.stdin.write(json.dumps({"do": verb, **arguments}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait(DEADLINE_S)
        self.process.stdout.close()


class Case(unittest.TestCase):
    def setUp(self):
        HOST.run("systemctl", "reset-failed", UNIT, *SOCKETS, check=False)

    def show(self, unit, name):
        return HOST.run("systemctl", "show", "--value", "-p", name, unit).stdout.strip()

    def main_pid(self):
        return int(self.show(UNIT, "MainPID"))

    def active(self, unit=UNIT):
        return self.show(unit, "ActiveState")

    def wait_active(self, what="an active service"):
        harness.wait_for(what, lambda: self.active() == "active", DEADLINE_S)

    def ctl(self, *arguments, user=machine.OPERATOR, code=0):
        def ask():
            done = HOST.run("modelctl", *arguments, user=user, check=False, deadline_s=240)
            # It waits 3 s for a connection; a daemon that has just been activated may take longer.
            return done if done.returncode != harness.EXIT_UNREACHABLE else None

        done = harness.wait_for(f"an answer to {arguments}", ask, DEADLINE_S)
        self.assertEqual(done.returncode, code, f"{arguments}\n{done.stdout}{done.stderr}")
        return done

    def json(self, *arguments):
        return json.loads(self.ctl(*arguments, "-o", "json").stdout)

    def client(self, user=machine.READER):
        client = Client(user)
        self.addCleanup(client.close)
        return client

    def ok(self, client, verb, **arguments):
        answer = client.call(verb, **arguments)
        self.assertTrue(answer["ok"], f"{verb} {arguments}: {answer}")
        return answer

    def source(self, seed, tensors=4, tensor_bytes=1 << 20):
        """A model's folder in the machine, with a sidecar."""
        folder = HOST.root / f"srv/model-{seed}-{tensors * tensor_bytes}"
        if not folder.exists():
            models.write_safetensors(folder / "model.safetensors", seed, tensors, tensor_bytes)
            (folder / "tokenizer.json").write_text(f'{{"seed": {seed}}}')
            folder.chmod(0o755)
        return "/" + str(folder.relative_to(HOST.root))

    def serve(self, model, version, **options):
        """Published and stable, whatever was before. Names the bytes of a version by its number."""
        self.ctl("publish", self.source(version, **options), "--model", model, "--version", version)
        self.ctl("swap", model, "--version", version)

    def leases(self, model):
        return [row for row in self.json("leases")["items"] if row["model"] == model]

    def configure(self, text):
        """The packaged configuration, and `text` after it."""
        path = HOST.root / "etc/modelhost/modelhostd.toml"
        packaged = (tree.ROOT / "deploy/modelhostd.toml").read_text()
        path.write_text(packaged + text)
        self.addCleanup(path.write_text, packaged)

    def reads(self, pid):
        """Bytes that a process of the machine asked for by read, and that came from the disk."""
        text = HOST.run("cat", f"/proc/{pid}/io").stdout
        fields = dict(line.split(": ") for line in text.splitlines())
        return int(fields["rchar"]), int(fields["read_bytes"])


    def locked_bytes(self, pid):
        text = HOST.run("cat", f"/proc/{pid}/status").stdout
        return int(re.search(r"VmLck:\s+(\d+) kB", text).group(1)) << 10


class Installed(Case):
    def test_users_groups_and_folders_are_what_the_packages_files_say(self):
        for name in ("modelhost", "modelhost-admin"):
            self.assertTrue(HOST.run("getent", "group", name).stdout.startswith(f"{name}:"))
        self.assertIn("nologin", HOST.run("getent", "passwd", "modelhost").stdout)
        for path, mode, owner in (("/var/lib/modelhost", "700", "modelhost"),
                                  ("/var/lib/modelhost/store", "700", "modelhost"),
                                  ("/var/lib/modelhost/state", "700", "modelhost"),
                                  ("/run/modelhost", "755", "modelhost"),
                                  ("/etc/modelhost", "755", "root")):
            with self.subTest(path):
                said = HOST.run("stat", "-c", "%a %U", path).stdout.split()
                self.assertEqual(said, [mode, owner])

    def test_systemd_has_no_complaint_about_the_units(self):
        for unit in (UNIT, *SOCKETS):
            self.assertEqual(self.show(unit, "LoadState"), "loaded")
        said = HOST.run("journalctl", "-b", "--no-pager", "-o", "cat", "_PID=1").stdout
        bad = [line for line in said.splitlines()
               if re.search(r"modelhost.*(unknown|invalid|ignoring|failed to parse)", line, re.I)
               # How systemd spells exit status 2, which other cases cause.
               and not line.endswith("status=2/INVALIDARGUMENT")]
        self.assertEqual(bad, [])

    def test_the_exposure_of_the_running_unit_is_under_two(self):
        self.json("status")
        for how in ((UNIT,), ("--offline=true", f"/usr/lib/systemd/system/{UNIT}")):
            with self.subTest(how):
                said = HOST.run("systemd-analyze", "security", "--no-pager", *how).stdout
                found = re.search(r"Overall exposure level for .*: ([0-9.]+)", said)
                self.assertIsNotNone(found, said)
                self.assertLess(float(found.group(1)), MOST_EXPOSURE, said)


class Activation(Case):
    def test_no_daemon_runs_until_the_first_client_of_either_socket(self):
        for socket, first in (("handles", self._native_client), ("control", self._operator)):
            with self.subTest(socket):
                HOST.run("systemctl", "stop", UNIT)
                self.assertEqual(self.active(), "inactive")
                self.assertEqual([self.active(unit) for unit in SOCKETS], ["active"] * 2)
                first()
                self.wait_active()

    def _native_client(self):
        self.ok(self.client(), "connect", deadline_ms=30000)

    def _operator(self):
        self.assertEqual(self.json("status")["pid"], self.main_pid())

    def test_ready_is_told_when_the_required_model_is_ready_and_no_earlier(self):
        self.serve("planner", 1)
        HOST.run("systemctl", "stop", UNIT)
        self.configure(REQUIRED.format(residency="pinned"))
        HOST.run("systemctl", "start", "--no-block", UNIT)
        # It answers, and says what it waits for; systemd still waits.
        harness.wait_for("a status that names the model", lambda: "gate" in " ".join(
            self.json("status")["notReady"]), DEADLINE_S)
        self.assertFalse(self.json("status")["ready"])
        self.assertEqual(self.active(), "activating")
        self.serve("gate", 1)
        self.wait_active("a service that became ready with its model")
        self.assertTrue(self.json("status")["ready"])

    def test_a_stop_ends_it_in_order_and_keeps_the_sockets(self):
        self.json("status")
        self.wait_active()
        HOST.run("systemctl", "stop", UNIT)
        self.assertEqual(self.show(UNIT, "Result"), "success")
        self.assertEqual(self.show(UNIT, "ExecMainStatus"), "0")
        for name in ("control", "handles"):
            self.assertEqual(HOST.run("stat", "-c", "%F", f"{RUNTIME}/{name}.sock").stdout.strip(),
                             "socket")


class Access(Case):
    def test_admins_change_readers_read_strangers_do_neither(self):
        self.serve("planner", 1)
        reader = self.client()
        self.ok(reader, "connect")
        self.ok(reader, "acquire", ref="planner")
        self.assertEqual(self.ok(reader, "seeds")["seeds"], [1])
        source = self.source(2)
        publish = ("publish", source, "--model", "planner", "--version", 2)
        self.ctl(*publish, user=machine.READER, code=harness.EXIT_PERMISSION)
        self.ctl("ls", user=machine.STRANGER, code=harness.EXIT_PERMISSION)
        stranger = self.client(machine.STRANGER)
        answers = [stranger.call("connect")]
        if answers[0]["ok"]:
            answers.append(stranger.call("acquire", ref="planner"))
        self.assertFalse(answers[-1]["ok"])
        self.assertEqual(answers[-1]["status"], "PERMISSION_DENIED")

    def test_root_cannot_open_what_it_was_given_for_writing(self):
        self.serve("planner", 1)
        self.assertEqual(self.json("status")["fileProtection"], "read_only_mount")
        probe = "\n".join((
            "import cabi, ctypes, errno, os, sys",
            f"client = cabi.Library('{LIBRARY}').connect('{RUNTIME}')",
            "handle = client.acquire('planner')",
            "for path in ('model.safetensors', 'tokenizer.json'):",
            "    _, fd_path = handle.file(path)",
            "    for flags in (os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_TRUNC):",
            "        try:",
            "            os.open(fd_path, flags)",
            "            print('opened', path)",
            "        except OSError as error:",
            "            print(errno.errorcode[error.errno])"))
        script = HOST.root / machine.TEST_FILES / "reopen.py"
        script.write_text(probe)
        said = HOST.run("python3", f"{FILES}/reopen.py").stdout.split()
        self.assertEqual(said, ["EROFS"] * 6)

    def test_metrics_are_on_the_loopback(self):
        self.json("status")
        self.wait_active()
        fetch = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9464/metrics').read().decode())"
        said = HOST.run("python3", "-c", fetch).stdout
        self.assertIn("modelhost_build_info", said)


class Faults(Case):
    """What ends the daemon: systemd starts it again, and clients go on."""

    def holding_client(self):
        self.serve("planner", 1)
        self.wait_active()
        client = self.client()
        self.ok(client, "connect")
        self.ok(client, "acquire", ref="planner")
        return client

    def signal(self, name, pid):
        HOST.run("sh", "-c", f"kill -{name} {pid}")

    def after_restart(self, client, pid, restarts):
        harness.wait_for("another process", lambda: self.main_pid() not in (0, pid), DEADLINE_S)
        self.wait_active()
        self.assertEqual(int(self.show(UNIT, "NRestarts")), restarts + 1)
        self.assertEqual(self.ok(client, "seeds")["seeds"], [1])
        harness.wait_for("a lease that is declared again", lambda: self.leases("planner"),
                         DEADLINE_S)
        self.ok(client, "acquire", ref="planner", key="b")
        self.assertEqual(self.ok(client, "seeds", key="b")["seeds"], [1])

    def test_killed_it_is_started_again_and_leases_are_declared_again(self):
        client = self.holding_client()
        pid, restarts = self.main_pid(), int(self.show(UNIT, "NRestarts"))
        self.signal("KILL", pid)
        self.after_restart(client, pid, restarts)

    def test_hanging_it_is_ended_by_the_watchdog_and_started_again(self):
        client = self.holding_client()
        pid, restarts = self.main_pid(), int(self.show(UNIT, "NRestarts"))
        self.signal("STOP", pid)
        self.assertEqual(self.ok(client, "seeds")["seeds"], [1])
        self.after_restart(client, pid, restarts)
        said = HOST.run("journalctl", "-b", "--no-pager", "-o", "cat", "-u", UNIT, "_PID=1").stdout
        self.assertIn("Watchdog timeout", said)

    def test_a_reload_takes_the_new_configuration_in_the_same_process(self):
        self.serve("planner", 1)
        self.wait_active()
        pid = self.main_pid()
        self.configure('\n[[models]]\nname = "planner"\nkeep_previous = "11m"\n')
        HOST.run("systemctl", "reload", UNIT)
        self.wait_active()
        self.assertEqual(self.main_pid(), pid)
        said = HOST.run("journalctl", "-b", "--no-pager", "-o", "cat", f"_PID={pid}").stdout
        self.assertIn("event=reload", said)
        self.configure("\n[nonsense]\n")
        HOST.run("systemctl", "reload", UNIT)
        self.assertEqual(self.json("status")["pid"], pid)


    def test_a_service_that_cannot_start_is_given_up_and_comes_back_when_mended(self):
        self.configure("\n[nonsense]\n")
        HOST.run("systemctl", "restart", UNIT, check=False)
        harness.wait_for("a failed service", lambda: self.active() == "failed", DEADLINE_S)
        self.configure("")
        HOST.run("systemctl", "reset-failed", "modelhostd*")
        HOST.run("systemctl", "start", *SOCKETS)
        # Status is answered from the moment the sockets are served, readiness comes with the models.
        harness.wait_for("it to be ready", lambda: self.json("status")["ready"], DEADLINE_S)


class Restart(Case):
    """`systemctl restart` under readers: READY again without reading a weight."""

    def restart_under_readers(self, model, residency):
        nbytes = large_model_bytes()
        self.configure(REQUIRED.format(residency=residency).replace("gate", model))
        HOST.run("systemctl", "restart", "--no-block", UNIT)
        self.serve(model, 7, tensors=4, tensor_bytes=nbytes // 4)
        self.wait_active()
        reader = HOST.start("python3", f"{FILES}/reader.py", LIBRARY, RUNTIME, model, 7,
                            user=machine.READER)
        self.addCleanup(reader.stdout.close)
        self.assertEqual(reader.stdout.readline(), "ready\n")
        before = self.json("status")
        HOST.run("systemctl", "restart", UNIT)
        # READY is what the restart has waited for; only now anything else is asked.
        asked, from_disk = self.reads(self.main_pid())
        self.assertGreaterEqual(self.locked_bytes(self.main_pid()), nbytes)
        after = self.json("status")
        self.assertEqual((before["epoch"] + 1, after["ready"]), (after["epoch"], True))
        harness.wait_for("the reader's lease", lambda: self.leases(model), DEADLINE_S)
        reader.stdin.close()
        seen = json.loads(reader.stdout.readline())
        reader.wait(DEADLINE_S)
        print(f"  restart, {residency}, {nbytes >> 20} MiB: {asked} bytes asked, {from_disk} from the "
              f"disk; readers: {seen}")
        for name, counts in seen.items():
            with self.subTest(name):
                self.assertEqual((counts["bad"], counts["failed"]), (0, 0), counts)
                self.assertGreater(counts["reads"], 1)
        self.assertLess(asked + from_disk, MOST_READ_AT_RESTART)
        return after

    def test_pinned_files_are_served_from_the_page_cache(self):
        self.restart_under_readers("large-pinned", "pinned")

    def test_sealed_memory_comes_back_from_systemd(self):
        self.restart_under_readers("large-sealed", "sealed")
        self.assertGreater(int(self.show(UNIT, "NFileDescriptorStore")), 0)


class ThenTheJournal(Case):
    def test_the_daemon_has_logged_no_error(self):
        said = HOST.run("journalctl", "-b", "--no-pager", "-o", "cat", "-u", UNIT,
                        "_COMM=modelhostd").stdout
        self.assertIn("event=start", said, "nothing was looked at")
        bad = [line for line in said.splitlines() if re.search(r"level=(error|critical)", line)
               and "nonsense" not in line]
        self.assertEqual(bad, [])


if __name__ == "__main__":
    unittest.main()
