"""What the tests of unmodified programs stand on: a real daemon, models that real engines run, and the
engines as an installation has them."""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "integration"))
import harness  # noqa: E402
import engine_models  # noqa: E402
import install  # noqa: E402

KINDS = ("mapped", "sealed")
wait_for = harness.wait_for


def policy(model, residency):
    return f'[[models]]\nname = "{model}"\nresidency = "{residency}"\n'


def need(module):
    """An optional Python module, or a skip that names it. The programs have it as Debian installs it."""
    done = subprocess.run(["/usr/bin/python3", "-B", "-c", f"import {module}"], capture_output=True, text=True,
                          check=False, env=harness.environment())
    if done.returncode != 0:
        raise unittest.SkipTest(f"Debian's python3-{module} is not installed ({done.stderr.strip()[-80:]})")


class Engines:
    """node, its packages and the programs of this folder, where every user of the tests may read them."""

    def __init__(self):
        self.copy = tempfile.TemporaryDirectory(prefix="modelhost-engines-")
        folder = pathlib.Path(self.copy.name)
        folder.chmod(0o755)
        self.programs = folder / "programs"
        self.programs.mkdir()
        for path in HERE.iterdir():
            if path.suffix in (".py", ".cjs", ".mjs"):
                shutil.copy(path, self.programs)
        self._modules = None

    def node(self, least=18):
        """The path of node. Skips the test where it or its packages cannot be had."""
        try:
            modules = install.node_modules()
            version = install.node_version()
            node = install.program("node")
        except install.Unavailable as reason:
            raise unittest.SkipTest(str(reason)) from None
        if version[0] < least:
            raise unittest.SkipTest(f"this engine's package needs node {least}, and node is {version[0]}")
        if self._modules is None:
            self._modules = self._readable(modules)
        return node

    def _readable(self, modules):
        seen = subprocess.run(["/usr/bin/test", "-r", str(modules / "onnxruntime-node/package.json")], check=False,
                              **harness.as_user(harness.CLIENT))
        if seen.returncode == 0:
            return modules
        copy = pathlib.Path(self.copy.name) / "node_modules"
        try:
            shutil.copytree(modules, copy, symlinks=True, copy_function=os.link)
        except OSError:  # Another file system.
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(modules, copy, symlinks=True)
        return copy

    def environment(self):
        # node asks for the user's home, and these users have none. No engine may read ours.
        return {"NODE_PATH": str(self._modules), "HOME": "/nonexistent"} if self._modules else {}

    def version(self, package):
        return json.loads((self._modules / package / "package.json").read_text())["version"]


_ENGINES = None


def engines():
    global _ENGINES
    if _ENGINES is None:
        _ENGINES = Engines()
    return _ENGINES


class Case(harness.Case):
    """Daemons of both kinds, and programs started by modelctl exec."""

    start_daemon = False

    def setUp(self):
        super().setUp()
        self.engines = engines()

    def daemon_with(self, residency, model, name=None, more=""):
        self.daemon = self.new_daemon(name=name or residency, config=policy(model, residency) + more)
        return self.daemon

    def program(self, name):
        return str(self.engines.programs / name)

    def plain(self, command):
        """What a program prints when it has the files themselves."""
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
                              timeout=4 * harness.DEADLINE_S, cwd="/",
                              env=harness.environment(**self.engines.environment()))
        self.assertEqual(done.returncode, 0, f"{command}: {done.stdout} {done.stderr}")
        return done.stdout

    def exec(self, ref, command, flags=(), expect=0, user=harness.CLIENT):
        """What a program prints under modelctl exec; with another `expect` its stderr."""
        done = self.daemon.ctl("exec", *flags, ref, "--", *command, user=user, deadline_s=4 * harness.DEADLINE_S,
                               env=self.engines.environment())
        self.assertEqual(done.code, expect, str(done))
        return done.err if expect else done.out

    def start(self, ref, command, flags=(), user=harness.CLIENT):
        """A Running program of a first line that is read, which goes on until its stdin ends."""
        running = Running(self.daemon, ref, command, flags, user, self.engines.environment())
        self.addCleanup(running.end)
        return running


class Running:
    """A program under modelctl exec that prints a line of JSON when it has its model."""

    def __init__(self, daemon, ref, command, flags, user, env):
        self.process = subprocess.Popen(
            [harness.PROGRAMS.ctl, "--runtime-dir", str(daemon.runtime), "exec", *flags, ref, "--", *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/",
            env=harness.environment(**env), **harness.as_user(user))
        self.line = self.process.stdout.readline()
        if not self.line:
            raise AssertionError(f"{command} ended with {self.process.wait(harness.DEADLINE_S)}: "
                                 f"{self.process.stderr.read()}")
        self.answer = json.loads(self.line)

    @property
    def engine_pid(self):
        """The program's own process, modelctl's child."""
        pid = self.process.pid
        return int(pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def ask(self, text=""):
        """Sends a line; the line that comes back, which is JSON."""
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline() or "null")

    def end(self):
        """Its exit status after its stdin has ended."""
        if self.process.returncode is None:
            try:
                self.process.communicate(timeout=harness.DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.communicate()
        return self.process.returncode


def shared_memory(pids, match):
    """Of all mappings whose name has `match`: {"rss": [of each pid], "pss": their sum}, in bytes."""
    rss, pss = [], 0
    for pid in pids:
        inside, mine = False, 0
        for line in pathlib.Path(f"/proc/{pid}/smaps").read_text().splitlines():
            word = line.split(maxsplit=1)
            if not word[0].endswith(":"):
                inside = match in line
            elif inside and word[0] == "Rss:":
                mine += int(word[1].split()[0]) * 1024
            elif inside and word[0] == "Pss:":
                pss += int(word[1].split()[0]) * 1024
        rss.append(mine)
    return {"rss": rss, "pss": pss}
