"""What the integration tests stand on: a daemon, an operator and clients as real processes.

As root, the three run as three users without any rights; as a plain user all run as that user, and
the cases that need more say so and are skipped. Nothing here sleeps for correctness: waits look for
the thing waited for, and have a deadline.
"""
import contextlib
import ctypes
import functools
import json
import os
import pathlib
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent

AS_ROOT = os.geteuid() == 0
DAEMON, OPERATOR, CLIENT, STRANGER, GUEST = (
    (64210, 64211, 64212, 64213, 64214) if AS_ROOT else (os.geteuid(),) * 5)
GUESTS, READERS, ADMINS = 64297, 64298, 64299
# A guest may read nothing by the daemon's own groups: a model has to name the guests.
GROUPS = {DAEMON: [], OPERATOR: [ADMINS, READERS], CLIENT: [READERS], STRANGER: [], GUEST: [GUESTS]}

DEADLINE_S = 30.0 * float(os.environ.get("MODELHOST_TEST_SLOW", "1"))

(EXIT_OK, EXIT_OTHER, EXIT_USAGE, EXIT_NOT_FOUND, EXIT_CONFLICT, EXIT_RESOURCES, EXIT_INTEGRITY,
 EXIT_TIMEOUT, EXIT_UNREACHABLE, EXIT_PERMISSION, EXIT_OLD_SERVES, EXIT_SUPERSEDED,
 EXIT_DEGRADED) = range(13)


class Programs:
    """Where the built programs are, readable by every user of the tests."""

    def __init__(self, build):
        build = pathlib.Path(build).resolve()
        self.build = build
        self.bin, self.lib, self.stress = build / "bin", build / "lib", build / "stress"
        self.fakecuda, self.device_worker = build / "tests/fakecuda", build / "tests/device_worker"
        self.ros_node = build / "tests/ros_node_driver"
        self.scripts = HERE
        self.python = build / "python"  # The Python package, where it was built.
        self._copy = None
        if AS_ROOT and not self._reachable():
            self._copy = tempfile.TemporaryDirectory(prefix="modelhost-programs-")
            copy = pathlib.Path(self._copy.name)
            copy.chmod(0o755)
            shutil.copytree(self.bin, copy / "bin")
            if self.stress.is_dir():
                shutil.copytree(self.stress, copy / "stress",
                                ignore=lambda _, names: [n for n in names if "." in n or n == "CMakeFiles"])
                self.stress = copy / "stress"
            (copy / "lib").mkdir()
            for library in self.lib.glob("libmodelhost*.so*"):
                shutil.copy2(library, copy / "lib", follow_symlinks=False)
            if self.device_worker.exists():
                shutil.copytree(self.fakecuda, copy / "fakecuda", symlinks=True)
                shutil.copy2(self.device_worker, copy / "device_worker")
                self.fakecuda, self.device_worker = copy / "fakecuda", copy / "device_worker"
            if self.ros_node.exists():
                shutil.copy2(self.ros_node, copy / "ros_node_driver")
                self.ros_node = copy / "ros_node_driver"
            if self.python.is_dir():
                shutil.copytree(self.python, copy / "python")
                self.python = copy / "python"
            (copy / "scripts").mkdir()
            for script in HERE.glob("*.py"):
                shutil.copy2(script, copy / "scripts")
            self.bin, self.lib, self.scripts = copy / "bin", copy / "lib", copy / "scripts"

    def _reachable(self):
        probe = subprocess.run(["/usr/bin/test", "-x", str(self.bin / "modelhostd"), "-a", "-r",
                                str(HERE / "worker.py")], user=CLIENT, group=CLIENT,
                               extra_groups=[], check=False)
        return probe.returncode == 0

    @property
    def daemon(self):
        return str(self.bin / "modelhostd")

    @property
    def ctl(self):
        return str(self.bin / "modelctl")

    @property
    def library(self):
        return str(self.lib / "libmodelhost.so")

    # The same three, but they can be told to end at a step (proto/handle/fault_point.h).
    @property
    def faulty_daemon(self):
        return str(self.bin / "modelhostd-faulty")

    @property
    def faulty_ctl(self):
        return str(self.bin / "modelctl-faulty")

    @property
    def faulty_library(self):
        return str(self.lib / "libmodelhost-faulty.so")

    @property
    def sanitized(self):
        return "asan" in self.build.name or "tsan" in self.build.name


PROGRAMS = None  # Set by run.py before any test runs.


def use_build(folder):
    global PROGRAMS
    PROGRAMS = Programs(folder)


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def end_with_us():
    """In a child: the kernel ends it when the test process ends, however that ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def as_user(uid):
    """Keyword arguments for subprocess that start a program as one of our users."""
    if not AS_ROOT:
        return {}
    return {"user": uid, "group": uid, "extra_groups": GROUPS.get(uid, [])}


@contextlib.contextmanager
def as_peer(uid):
    """Who connects meanwhile is `uid` to the other side: the kernel notes it then."""
    if not AS_ROOT:
        yield
        return
    groups = os.getgroups()
    os.setegid(uid)
    os.setgroups(GROUPS[uid])
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setgroups(groups)
        os.setegid(0)


def environment(**more):
    # PYTHONMALLOC etc. of the person who runs the tests are not the programs' business.
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8",
           "LD_LIBRARY_PATH": str(PROGRAMS.lib), "PYTHONDONTWRITEBYTECODE": "1"}
    for name in ("ASAN_OPTIONS", "UBSAN_OPTIONS", "TSAN_OPTIONS", "LSAN_OPTIONS"):
        if name in os.environ:
            env[name] = os.environ[name]
    env.update(more)
    return env


FULL = os.environ.get("MODELHOST_STRESS", "") == "full"


def many(quick, full):
    """How often something is done: `full` times only with MODELHOST_STRESS=full."""
    return full if FULL else quick


def footprint(pid):
    """What a process has: bytes resident and locked, and how many descriptors, maps, threads."""
    status = dict(line.split(":", 1) for line in
                  pathlib.Path(f"/proc/{pid}/status").read_text().splitlines())
    return {"rss": int(status["VmRSS"].split()[0]) * 1024, "locked": int(status["VmLck"].split()[0]) * 1024,
            "anonymous": int(status["RssAnon"].split()[0]) * 1024,
            "fds": len(os.listdir(f"/proc/{pid}/fd")),
            "maps": len(pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines()),
            "threads": int(status["Threads"])}


def wait_for(what, condition, deadline_s=None):
    """The first true answer of `condition`, looked at again and again until the deadline."""
    end = time.monotonic() + (deadline_s or DEADLINE_S)
    pause = 0.002
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > end:
            raise AssertionError(f"waited in vain for: {what}")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)


class Result:
    """How a program ended."""

    def __init__(self, arguments, code, out, err):
        self.arguments, self.code, self.out, self.err = arguments, code, out, err

    def json(self):
        return json.loads(self.out)

    def __str__(self):
        return f"{' '.join(self.arguments)} -> {self.code}\nstdout: {self.out}\nstderr: {self.err}"


class Notifications:
    """What a daemon tells systemd. Read all the time, as systemd does: the socket's queue is short."""

    def __init__(self, path):
        self.messages = []
        self._end = threading.Event()
        notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notify.bind(str(path))
        path.chmod(0o666)
        notify.settimeout(0.1)
        threading.Thread(target=self._read, args=(notify,), daemon=True).start()

    def _read(self, notify):
        with notify:
            while not self._end.is_set():
                try:
                    self.messages.extend(notify.recv(4096).decode().split("\n"))
                except TimeoutError:
                    pass

    def close(self):
        self._end.set()


class Daemon:
    """One modelhostd with a store, a state and a runtime directory of its own."""

    def __init__(self, folder, config=None, limits=None, arguments=(), store=None, wait=True,
                 metrics="off", program=None, env=None):
        self.folder = pathlib.Path(folder)
        self.store = pathlib.Path(store) if store else self.folder / "store"
        self.state = self.folder / "state"
        self.runtime = self.folder / "run"
        self.config_text = config
        self.limits = limits or {}
        self.arguments = list(arguments)
        self.metrics = metrics
        self.program = program  # Another modelhostd than the built one.
        self.env = env or {}
        self.process = None
        self.told_to_end = False  # By kill or stop; any other end is a failure.
        self.exit_code = None
        self.notify = None
        self.log = self.folder / "daemon.log"
        for path in (self.store, self.state, self.runtime):
            self._make(path)
        self.runtime.chmod(0o755)
        if wait:
            self.start()

    def _make(self, path):
        if not path.exists():
            path.mkdir(parents=True, mode=0o700)
            if AS_ROOT:
                os.chown(path, DAEMON, DAEMON)

    def command(self):
        text = self.config_text if self.config_text is not None else ""
        access = f'[access]\nread_groups = ["{READERS}"]\nadmin_groups = ["{ADMINS}"]\n'
        config = self.folder / "modelhostd.toml"
        config.write_text(text + ("\n" + access if "[access]" not in text else ""))
        config.chmod(0o644)
        return [str(self.program or PROGRAMS.daemon), "--config", str(config), "--store", str(self.store), "--state",
                str(self.state), "--runtime-dir", str(self.runtime), "--metrics", self.metrics,
                "--log-level", "debug", *self.arguments]

    def start(self, wait_ready=True, user=None):
        path = self.folder / "notify.sock"
        path.unlink(missing_ok=True)
        self.notify = Notifications(path)
        limits = self.limits

        def set_limits():
            end_with_us()
            for name, value in limits.items():
                resource.setrlimit(getattr(resource, name), (value, value))

        self.told_to_end, self.exit_code = False, None
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment(NOTIFY_SOCKET=str(path), **self.env), cwd="/", preexec_fn=set_limits,
                **as_user(DAEMON if user is None else user))
        if wait_ready:
            self.wait_ready()
        return self

    def wait_ready(self, deadline_s=None):
        end = time.monotonic() + (deadline_s or DEADLINE_S)
        while "READY=1" not in self.notify.messages:
            if self.process.poll() is not None:
                raise AssertionError(f"modelhostd ended with {self.process.returncode}:\n"
                                     f"{self.log_tail()}")
            if time.monotonic() > end:
                raise AssertionError(f"modelhostd is not ready in time:\n{self.log_tail()}")
            time.sleep(0.005)

    def reload(self):
        """SIGHUP, and what it told systemd until it was ready again."""
        self.notify.messages.clear()
        self.process.send_signal(signal.SIGHUP)
        self.wait_ready()
        return self.notify.messages

    def log_tail(self, lines=40):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    @property
    def alive(self):
        return self.process is not None and self.process.poll() is None

    @property
    def handles_socket(self):
        return self.runtime / "handles.sock"

    def kill(self):
        """As the kernel would: no clean-up of any kind."""
        self.check_alive()
        self.told_to_end = True
        self.process.kill()
        self.process.wait()
        self.notify.close()

    def check_alive(self):
        """Nobody told it to end: then it must run."""
        if self.process is not None and not self.told_to_end and self.process.poll() is not None:
            self.told_to_end = True  # Said once.
            raise AssertionError(f"modelhostd ended by itself with {self.process.returncode}:\n"
                                 f"{self.log_tail()}")

    def stop(self, deadline_s=None):
        """SIGTERM; the exit status."""
        if self.process is None:
            return None
        self.check_alive()
        self.told_to_end = True
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.exit_code = self.process.wait(deadline_s or DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"modelhostd does not stop:\n{self.log_tail()}") from None
        finally:
            self.notify.close()
        return code

    def ctl(self, *arguments, user=OPERATOR, deadline_s=None, env=None):
        command = [PROGRAMS.ctl, "--runtime-dir", str(self.runtime), *map(str, arguments)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=deadline_s or 2 * DEADLINE_S, check=False, cwd="/",
                              env=environment(**(env or {})), **as_user(user))
        return Result(command[3:], done.returncode, done.stdout, done.stderr)

    def ctl_start(self, *arguments, user=OPERATOR, program=None, env=None):
        command = [program or PROGRAMS.ctl, "--runtime-dir", str(self.runtime),
                   *map(str, arguments)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, cwd="/",
                                env=environment(**(env or {})), start_new_session=True,
                                **as_user(user))


class Rpc:
    """An rpc_probe process: any call on control.sock, with any request."""

    def __init__(self, daemon, user=OPERATOR):
        self.process = subprocess.Popen(
            [str(PROGRAMS.stress / "rpc_probe"), f"--runtime-dir={daemon.runtime}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(), cwd="/", preexec_fn=end_with_us, **as_user(user))

    def call(self, method, request=None, hold=False, deadline_s=60):
        """{"code", "reason", "message", "responses"}"""
        self.process.stdin.write(json.dumps({"method": method, "request": request or {}, "hold": hold,
                                             "deadline_s": deadline_s}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"rpc_probe: {self.process.stderr.read()}")
        answer = json.loads(line)
        answer["code"] = int(answer["code"])
        return answer

    def close(self):
        self.process.kill()
        self.process.communicate()

    @staticmethod
    @functools.cache
    def methods():
        """{"Method": {"field": "type"}}"""
        done = subprocess.run([str(PROGRAMS.stress / "rpc_probe"), "--describe"], capture_output=True,
                              text=True, check=True, env=environment())
        return json.loads(done.stdout)


class Client:
    """A worker.py process; every method call is one command to it."""

    # `prefix`: a program that root starts, which then starts the worker as whom it likes.
    def __init__(self, daemon, user=CLIENT, limits=None, connect=True, library=None, more_env=None,
                 prefix=()):
        limits = limits or {}

        def set_limits():
            end_with_us()
            for name, value in limits.items():
                resource.setrlimit(getattr(resource, name), (value, value))

        env = environment(**(more_env or {}))
        if PROGRAMS.sanitized:
            runtime = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True,
                                     text=True, check=True).stdout.strip()
            env["LD_PRELOAD"] = runtime
            env["ASAN_OPTIONS"] = env.get("ASAN_OPTIONS", "") + ":detect_leaks=0"
        self.process = subprocess.Popen(
            [*prefix, "/usr/bin/python3", "-B", str(PROGRAMS.scripts / "worker.py"),
             library or PROGRAMS.library,
             str(daemon.runtime)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=env, cwd="/", preexec_fn=set_limits, **({} if prefix else as_user(user)))
        if connect:
            answer = self.call("connect")
            if not answer["ok"]:
                raise AssertionError(f"a client could not connect: {answer}")

    @property
    def pid(self):
        return self.process.pid

    def begin(self, verb, **arguments):
        self.process.stdin.write(json.dumps({"do": verb, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"a client died with {self.process.wait()}")
        return json.loads(line)

    def call(self, verb, **arguments):
        self.begin(verb, **arguments)
        return self.answer()

    def ok(self, verb, **arguments):
        answer = self.call(verb, **arguments)
        if not answer["ok"]:
            raise AssertionError(f"{verb} {arguments}: {answer}")
        return answer

    def kill(self):
        self.process.kill()
        self.close()

    def close(self):
        if self.process.stdin and not self.process.stdin.closed:
            try:
                self.process.stdin.close()
            except BrokenPipeError:
                pass
        try:
            self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class Case(unittest.TestCase):
    """A test with a folder of its own and, by default, a running daemon."""

    daemon_options = {}
    start_daemon = True

    def setUp(self):
        self._folder = tempfile.TemporaryDirectory(prefix="modelhost-test-")
        self.addCleanup(self._folder.cleanup)
        self.folder = pathlib.Path(self._folder.name)
        self.folder.chmod(0o755)
        self.daemon = None
        if self.start_daemon:
            self.daemon = self.new_daemon(**self.daemon_options)

    def new_daemon(self, name="d", **options):
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
        daemon = Daemon(folder, wait=False, **options)
        self.addCleanup(self._finish, daemon)
        daemon.start()
        return daemon

    def _finish(self, daemon):
        if daemon.process is None:
            return
        try:
            if daemon.alive or not daemon.told_to_end:
                daemon.stop()
            if daemon.exit_code not in (None, 0):
                raise AssertionError(f"modelhostd ended with {daemon.exit_code} on SIGTERM:\n"
                                     f"{daemon.log_tail()}")
        finally:
            self.check_log(daemon)

    def check_log(self, daemon):
        text = daemon.log.read_text(errors="replace")
        for bad in ("AddressSanitizer", "runtime error:", "ThreadSanitizer", "LeakSanitizer",
                    "event=invalid_transition", "Check failed"):
            if bad in text:
                raise AssertionError(f"the daemon's log has {bad!r}:\n{text[-4000:]}")

    def client(self, **options):
        client = Client(options.pop("daemon", self.daemon), **options)
        self.addCleanup(client.close)
        return client

    def rpc(self, **options):
        rpc = Rpc(options.pop("daemon", self.daemon), **options)
        self.addCleanup(rpc.close)
        return rpc

    def stress(self, program, *arguments, user=CLIENT, deadline_s=600, expect=0):
        """Runs a program of tests/stress; what it printed."""
        done = subprocess.run(
            [str(PROGRAMS.stress / program), f"--runtime-dir={self.daemon.runtime}", *arguments],
            capture_output=True, text=True, check=False, cwd="/", env=environment(),
            timeout=deadline_s, preexec_fn=end_with_us, **as_user(user))
        self.assertEqual(done.returncode, expect, f"{program}: {done.stdout} {done.stderr}")
        print(done.stdout.strip(), end=" ", flush=True)
        return json.loads(done.stdout)

    def source(self, name="source"):
        """A folder that only the operator may read."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return folder

    def give(self, folder, uid=OPERATOR):
        """Hands a tree to a user, closed to all others."""
        folder = pathlib.Path(folder)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o700 if path.is_dir() else 0o600)
            if AS_ROOT:
                os.chown(path, uid, uid)
        return folder

    def ctl(self, *arguments, expect=EXIT_OK, **options):
        result = (options.pop("daemon", None) or self.daemon).ctl(*arguments, **options)
        self.assertEqual(result.code, expect, str(result))
        if expect not in (EXIT_OK, EXIT_DEGRADED):
            self.assertEqual(result.out, "", f"stdout of a failure is empty\n{result}")
            errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
            self.assertEqual(len(errors), 1, f"one error line\n{result}")
        return result

    def json(self, *arguments, **options):
        return self.ctl("-o", "json", *arguments, **options).json()

    def publish(self, model, version, folder=None, seed=None, label=None, **model_options):
        import models
        if folder is None:
            folder = models.simple_model(self.folder / f"src-{model}-{version}",
                                         version if seed is None else seed, **model_options)
        self.give(folder)
        more = ["--label", label] if label else []
        self.ctl("publish", folder, "--model", model, "--version", version, *more)
        return folder

    def serve(self, model, version, **options):
        """Publishes a version and makes it the stable one."""
        self.publish(model, version, **options)
        self.ctl("swap", model, "--version", version)

    def version_row(self, model, version):
        rows = self.json("versions", model, "--all")["items"]
        for row in rows:
            if row["version"] == version:
                return row
        self.fail(f"{model}@{version} is not in {rows}")
        return None

    def wait_leases(self, count, model=None, daemon=None):
        arguments = ["leases"] + (["--model", model] if model else [])
        wait_for(f"{count} leases", lambda: len(
            (daemon or self.daemon).ctl("-o", "json", *arguments).json()["items"]) == count)


def smoke(test):
    """Marks a case for slow builds (run.py --smoke)."""
    test.smoke = True
    return test


def needs_root(test):
    return unittest.skipUnless(AS_ROOT, "needs root, to start programs as several users")(test)
