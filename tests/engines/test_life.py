"""A program under modelctl exec while things happen: swaps, signals, deaths, children."""
import fcntl
import json
import os
import pathlib
import resource
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import engine_case  # noqa: E402
import frames  # noqa: E402
import harness  # noqa: E402
import models  # noqa: E402

wait_for = harness.wait_for
PYTHON = ["/usr/bin/python3", "-B"]
FILES = ("{model.safetensors}", "{tokenizer.json}")


class Life(engine_case.Case):
    def begin(self, residency="mapped", flags=()):
        self.daemon_with(residency, "planner", more='keep_previous = "0s"\n')
        self.serve("planner", 1)
        # An engine has a folder of its own for what modelctl makes.
        self.runtime = self.folder / f"user-{residency}"
        self.runtime.mkdir()
        if harness.AS_ROOT:
            os.chown(self.runtime, harness.CLIENT, harness.CLIENT)
        self.engines_env = {"XDG_RUNTIME_DIR": str(self.runtime)}
        version = self.daemon.store / "models/planner/versions/1"
        self.first = {name: models.sha256(version / name) for name in ("model.safetensors", "tokenizer.json")}
        running = self.start("planner", [*PYTHON, self.program("ask_files.py"), *FILES], flags)
        self.assertEqual(running.answer["pid"], running.engine_pid)
        if not flags:
            self.assertEqual(running.answer["files"], self.first)
        return running

    def start(self, ref, command, flags=()):
        running = engine_case.Running(self.daemon, ref, command, flags, harness.CLIENT, self.engines_env)
        self.addCleanup(running.end)
        return running

    def folders(self):
        return os.listdir(self.runtime)

    def test_a_swap_leaves_it_what_it_has(self):
        for residency in engine_case.KINDS:
            with self.subTest(residency=residency):
                running = self.begin(residency)
                self.serve("planner", 2)
                # It opens its paths again, long after the version has lost its label.
                self.assertEqual(running.ask()["files"], self.first)
                self.assertEqual([row["version"] for row in self.json("leases")["items"]], [1])
                newer = self.start("planner", [*PYTHON, self.program("ask_files.py"), *FILES])
                self.assertNotEqual(newer.answer["files"], self.first)
                self.assertEqual((running.end(), newer.end()), (0, 0))
                self.wait_leases(0)
                # Nobody holds it any more, and it goes.
                wait_for("version 1 to be unloaded", lambda: self.version_row("planner", 1)["state"] == "STAGED")

    def test_it_goes_on_without_the_daemon_and_its_lease_comes_back(self):
        for residency in engine_case.KINDS:
            with self.subTest(residency=residency):
                running = self.begin(residency)
                self.daemon.kill()
                self.assertEqual(running.ask()["files"], self.first)
                self.daemon.start()
                self.wait_leases(1)
                self.assertEqual(running.ask()["files"], self.first)
                self.assertEqual(running.end(), 0)
                self.wait_leases(0)

    def test_a_signal_to_modelctl_is_the_programs(self):
        running = self.begin()
        self.assertEqual(len(self.folders()), 1)
        running.process.send_signal(signal.SIGTERM)
        self.assertEqual(running.process.wait(harness.DEADLINE_S), 128 + signal.SIGTERM)
        self.assertEqual(self.folders(), [])
        self.wait_leases(0)

    def by_shell(self, line, *arguments, **more):
        """modelctl as `ctl`, from a shell that has done something first."""
        process = subprocess.Popen(
            ["/bin/sh", "-c", line.replace("ctl ", '"$0" --runtime-dir "$1" '), harness.PROGRAMS.ctl, self.daemon.runtime,
             *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/",
            env=harness.environment(), **more, **harness.as_user(harness.CLIENT))
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        return process

    def test_a_launcher_that_ignores_the_ends_of_its_children(self):
        self.daemon_with("mapped", "planner")
        self.serve("planner", 1)
        for command, code in (["/bin/sh", "-c", "sleep 0.2; exit 7"], 7), (["/bin/grep", "SigIgn", "/proc/self/status"], 0):
            process = subprocess.Popen(
                [harness.PROGRAMS.ctl, "--runtime-dir", self.daemon.runtime, "exec", "planner", "--", *command],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, cwd="/", env=harness.environment(),
                preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN), **harness.as_user(harness.CLIENT))
            self.addCleanup(process.communicate)
            self.addCleanup(process.kill)
            self.assertEqual(process.wait(harness.DEADLINE_S), code)
        # The program is started as we were.
        self.assertTrue(int(process.stdout.read().split()[1], 16) & 1 << (signal.SIGCHLD - 1))

    def test_what_nohup_ignores_does_not_end_the_wait_for_a_version(self):
        self.daemon_with("mapped", "planner")
        process = self.by_shell("trap '' HUP; exec ctl exec --timeout 60s planner -- /bin/echo ran")
        wait_for("modelctl to wait", lambda: any(
            row["pid"] == process.pid for row in self.json("clients")["items"]))
        process.send_signal(signal.SIGHUP)
        self.serve("planner", 1)
        self.assertEqual(process.communicate(timeout=harness.DEADLINE_S), ("ran\n", ""))
        self.assertEqual(process.returncode, 0)

    def test_a_terminal_that_hangs_up_ends_the_program(self):
        self.daemon_with("mapped", "planner")
        self.serve("planner", 1)
        ours, its = os.openpty()
        # As `ssh -t robot modelctl exec ...`: modelctl leads the session of the terminal.
        process = self.by_shell("exec ctl exec planner -- /bin/sleep 600", start_new_session=True, pass_fds=[its],
                                preexec_fn=lambda: fcntl.ioctl(its, termios.TIOCSCTTY, 0))
        os.close(its)
        wait_for("the program", lambda: (pathlib.Path(
            f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))
        os.close(ours)
        self.assertEqual(process.wait(harness.DEADLINE_S), 128 + signal.SIGHUP)
        self.wait_leases(0)

    def test_the_terminals_ctrl_c_reaches_a_program_of_a_group_of_its_own(self):
        self.daemon_with("mapped", "planner")
        self.serve("planner", 1)
        ours, its = os.openpty()
        self.addCleanup(os.close, ours)
        process = self.by_shell("exec ctl exec planner -- /usr/bin/setsid /bin/sleep 600", start_new_session=True,
                                pass_fds=[its], preexec_fn=lambda: fcntl.ioctl(its, termios.TIOCSCTTY, 0))
        os.close(its)
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")

        def asleep():
            pids = children.read_text().split()
            return pids and pathlib.Path(f"/proc/{pids[0]}/comm").read_text() == "sleep\n"

        wait_for("the program", asleep)
        self.addCleanup(self.end, int(children.read_text()))
        os.write(ours, b"\x03")
        self.assertEqual(process.wait(harness.DEADLINE_S), 128 + signal.SIGINT)

    def end(self, pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def test_the_program_has_the_environment_that_modelctl_was_given(self):
        self.daemon_with("mapped", "planner")
        self.serve("planner", 1)
        environment = harness.environment(PLAN="b")
        out = self.daemon.ctl("exec", "planner", "--", "/usr/bin/env", user=harness.CLIENT, env={"PLAN": "b"}).out
        self.assertEqual(sorted(out.splitlines()), sorted(f"{name}={value}" for name, value in environment.items()))

    def test_a_program_that_is_killed_is_reported_as_a_shell_does(self):
        running = self.begin()
        os.kill(running.engine_pid, signal.SIGKILL)
        self.assertEqual(running.process.wait(harness.DEADLINE_S), 128 + signal.SIGKILL)
        self.assertEqual(self.folders(), [])
        self.wait_leases(0)

    def test_without_modelctl_it_keeps_its_files_and_not_the_lease(self):
        running = self.begin()
        running.process.kill()
        running.process.wait(harness.DEADLINE_S)
        self.wait_leases(0)
        self.serve("planner", 2)
        wait_for("version 1 to be unloaded", lambda: self.version_row("planner", 1)["state"] == "STAGED")
        # The descriptors are its own; the folder is left, for nobody is there to remove it.
        self.assertEqual(running.ask()["files"], self.first)
        running.process.stdin.close()
        self.assertEqual(running.process.stdout.read(), "")
        self.assertEqual(len(self.folders()), 1)

    def test_a_daemon_that_is_slow_is_waited_for(self):
        self.begin()
        os.kill(self.daemon.process.pid, signal.SIGSTOP)
        process = self.daemon.ctl_start("exec", "planner", "--", "/bin/echo", "ran", user=harness.CLIENT)
        stopped = time.monotonic()
        try:
            # Longer than one of its tries; it has no --timeout.
            wait_for("a second of silence", lambda: process.poll() is not None or time.monotonic() > stopped + 1)
        finally:
            os.kill(self.daemon.process.pid, signal.SIGCONT)
        out, err = process.communicate(timeout=harness.DEADLINE_S)
        self.assertEqual((process.returncode, out), (0, "ran\n"), err)

    def test_ctrl_c_ends_the_wait_for_a_file_of_a_daemon_that_hangs(self):
        self.daemon_with("sealed", "planner")
        self.serve("planner", 1)
        runtime = self.folder / "between"
        runtime.mkdir()
        (runtime / "control.sock").symlink_to(self.daemon.runtime / "control.sock")
        asked, stop = threading.Event(), threading.Event()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(runtime / "handles.sock"))
            os.chmod(runtime / "handles.sock", 0o666)
            listener.listen()
            passing = threading.Thread(target=self.pass_on, args=(listener, asked, stop))
            passing.start()
            try:
                process = subprocess.Popen(
                    [harness.PROGRAMS.ctl, "--runtime-dir", runtime, "exec", "planner", "--", "/bin/echo"], text=True,
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/",
                    env=harness.environment(), start_new_session=True, **harness.as_user(harness.CLIENT))
                self.addCleanup(process.kill)
                self.assertTrue(asked.wait(harness.DEADLINE_S))
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=20)  # The answer has 30 s.
            finally:
                stop.set()
                passing.join()
        self.assertEqual((process.returncode, out), (130, ""), err)

    def pass_on(self, listener, asked, stop):
        """Between clients and the daemon: what asks for a file goes no further."""
        other = {}
        while not stop.is_set():
            for ready in select.select([listener, *other], [], [], 0.1)[0]:
                if ready is listener:
                    client, daemon = listener.accept()[0], socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    daemon.connect(str(self.daemon.handles_socket))
                    other.update({client: daemon, daemon: client})
                    continue
                if ready not in other:
                    continue
                try:
                    frame, fds, _, _ = socket.recv_fds(ready, 1 << 17, 64)
                except ConnectionResetError:
                    frame, fds = b"", []
                if not frame:
                    for end in (other.pop(other[ready]), other.pop(ready)):
                        end.close()
                elif frames.HEADER.unpack_from(frame)[1] == frames.FETCH:
                    asked.set()
                else:
                    socket.send_fds(other[ready], [frame], fds)
                for fd in fds:
                    os.close(fd)
        for end in other:
            end.close()

    def test_a_version_of_more_files_than_the_program_may_open(self):
        self.daemon_with("mapped", "planner")
        folder = models.simple_model(self.folder / "many", 1)
        for number in range(150):
            (folder / f"extra-{number:03d}.txt").write_text(str(number))
        self.serve("planner", 1, folder=folder)
        # The limit is the program's, who opens the paths one by one; modelctl raises its own.
        code = "ulimit -Sn; for file in \"$0\"/*; do cat \"$file\" > /dev/null || exit 1; done; cat \"$0/extra-149.txt\""
        self.assertEqual(self.with_limit("-Sn 40", ["/bin/sh", "-c", code, "{}"]), "40\n149")

    def test_descriptors_stand_above_the_programs_limit_or_at_its_end(self):
        self.daemon_with("mapped", "planner")
        self.serve("planner", 1)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        for limit, least in (("-Sn 200", 200), ("-n 200", 190), ("-c 0", min(soft, hard - 10, 16384))):
            number = int(self.with_limit(limit, ["/bin/echo", "{model.safetensors}"], "--fd-paths").rpartition("/")[2])
            self.assertGreaterEqual(number, least, limit)
            out = self.with_limit(limit, ["/bin/cat", "{tokenizer.json}"])
            self.assertEqual(json.loads(out)["seed"], 1)

    def with_limit(self, limit, command, *flags):
        """What a program prints under a limit of descriptors, as ulimit takes it."""
        done = subprocess.run(["/bin/sh", "-c", f'ulimit {limit}; exec "$0" "$@"', harness.PROGRAMS.ctl, "--runtime-dir",
                               str(self.daemon.runtime), "exec", *flags, "planner", "--", *command],
                              capture_output=True, text=True, check=False, timeout=2 * harness.DEADLINE_S, cwd="/",
                              env=harness.environment(), **harness.as_user(harness.CLIENT))
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_children_have_the_files_unless_they_close_descriptors(self):
        code = """
import json, multiprocessing, os, subprocess, sys
path = sys.argv[1]
size = os.path.getsize(path)

def seen(pool):
    try:
        return pool.apply(os.path.getsize, [path]) == size
    except OSError:
        return False

pid = os.fork()
if pid == 0:
    os._exit(0 if os.path.getsize(path) == size else 1)
forked = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
wc = lambda **how: subprocess.run(["/usr/bin/test", "-s", path], **how).returncode
print(json.dumps({"forked": forked, "exec": wc(close_fds=False), "closed": wc(close_fds=True),
                  "shell": os.system(f"test -s '{path}'"),
                  **{method: seen(multiprocessing.get_context(method).Pool(1)) for method in ("fork", "spawn")}}))
"""
        for residency in engine_case.KINDS:
            self.daemon_with(residency, "planner")
            self.serve("planner", 1)
            for flags in ((), ("--fd-paths",)):
                with self.subTest(residency=residency, flags=flags):
                    out = json.loads(self.exec("planner", [*PYTHON, "-c", code, "{model.safetensors}"], flags))
                    # Python's subprocess closes what it inherited unless it is told not to.
                    self.assertEqual(out, {"forked": 0, "exec": 0, "closed": 1, "shell": 0, "fork": True,
                                           "spawn": False})
