"""A daemon and clients on the fake driver (tests/fakes/fakecuda), and what is on its GPUs."""
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess

import harness
from harness import CLIENT, DEADLINE_S, Case, as_user, end_with_us, environment, wait_for

CONFIG = """
[device]
check_interval = "200ms"
pinned_ring = "8MiB"
threads = 2
[[models]]
name = "planner"
device = "all"
keep_previous = "1h"
"""
GRANULARITY = 2 << 20


def fake(**more):
    """The environment of a process that finds the fake driver."""
    programs = harness.PROGRAMS
    return {"LD_LIBRARY_PATH": f"{programs.fakecuda}:{programs.lib}", **more}


def device_memory(machine):
    """{inode: bytes} of all device memory of a test's machine that some process has."""
    name = re.compile(rf"/memfd:fakecuda-gpu\d+-{machine} ")
    found = {}
    for process in pathlib.Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for entry in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if name.match(os.readlink(entry)):
                        status = entry.stat()
                        found[status.st_ino] = status.st_size // GRANULARITY * GRANULARITY
            for line in (process / "maps").read_text().splitlines():
                if name.search(line):
                    found.setdefault(int(line.split()[4]), 0)
    return found


class DeviceWorker:
    """A device_worker process; every call is one command to it."""

    def __init__(self, daemon, user=CLIENT, env=None):
        self.process = subprocess.Popen(
            [str(harness.PROGRAMS.device_worker), str(daemon.runtime)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, cwd="/", preexec_fn=end_with_us,
            env=environment(**(fake() if env is None else env)), **as_user(user))

    @property
    def pid(self):
        return self.process.pid

    def begin(self, *parts):
        self.process.stdin.write(" ".join(map(str, parts)) + "\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"a client died with {self.process.wait()}")
        return json.loads(line)

    def call(self, *parts):
        self.begin(*parts)
        return self.answer()

    def ok(self, *parts):
        answer = self.call(*parts)
        if not answer["ok"]:
            raise AssertionError(f"{parts}: {answer}")
        return answer

    def dies(self, *parts):
        """The signal that a command ends the process with."""
        self.begin(*parts)
        line = self.process.stdout.readline()
        if line:
            raise AssertionError(f"{parts} was survived: {line}")
        return -self.process.wait(DEADLINE_S)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class DeviceCase(Case):
    """`gpu_env`: what the daemon's fake driver is told; the workers' are told the same."""

    gpu_env = {}
    config = CONFIG

    def setUp(self):
        # Of its own: other tests run at the same time.
        self.machine = f"m{os.getpid()}x{id(self):x}"
        self.daemon_options = {"config": self.config, "env": self.fake(**self.gpu_env)}
        super().setUp()
        if self.start_daemon:
            self.found_gpus()

    def fake(self, **more):
        return fake(FAKECUDA_MACHINE=self.machine, **more)

    def copies(self):
        """Device memory that somebody has: how many pieces, and their bytes."""
        now = device_memory(self.machine)
        return len(now), sum(now.values())

    def found_gpus(self, daemon=None):
        """Waits until the daemon has looked for GPUs. They are told in the order of the driver."""
        def known():
            status = (daemon or self.daemon).ctl("-o", "json", "status").json()["device"]
            return status if "still looking" not in status["reason"] else None
        self.gpus = wait_for("the GPUs to be known", known)["devices"]
        return self.gpus

    def status(self, **options):
        return self.json("status", **options)["device"]

    def worker(self, env=None, **options):
        more = {} if env is None else {"env": env}
        if env is None:
            more["env"] = self.fake(**self.gpu_env)
        worker = DeviceWorker(options.pop("daemon", self.daemon), **more, **options)
        self.addCleanup(worker.close)
        return worker

    def agents(self, daemon=None):
        """The processes that make the daemon's CUDA calls."""
        found = []
        parent = (daemon or self.daemon).process.pid
        for process in pathlib.Path("/proc").iterdir():
            if not process.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                status = (process / "status").read_text()
                if f"\nPPid:\t{parent}\n" not in status:
                    continue
                if b"device-agent" in (process / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(process.name))
        return found

    def same_bytes(self, worker, key, tensors):
        answer = worker.ok("compare", key)
        self.assertEqual((answer["tensors"], answer["differ"]), (tensors, 0), answer)

    def kill_agents(self):
        pids = self.agents()
        self.assertTrue(pids, "no device agent runs")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
