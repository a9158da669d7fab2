"""A machine to try the packaged service on: a Debian tree booted by systemd-nspawn.

    machine.py --check [--build DIR]    exit 0 when there can be one, 77 and the reason when not

systemd runs as its process 1, in namespaces and a control group of its own; commands are run in it
by nsenter. Whatever ends the tests, the kernel ends the machine too, and the next run removes its
folder.
"""
import argparse
import fcntl
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent / "integration"))
import harness  # noqa: E402
import tree  # noqa: E402

BOOT_DEADLINE_S = 180
CGROUPS = pathlib.Path("/sys/fs/cgroup")
TEST_FILES = "opt/modelhost-test"
READER, OPERATOR, STRANGER = "reader", "operator", "stranger"
USERS = f"""\
u {READER} - - /nonexistent
m {READER} modelhost
u {OPERATOR} - - /nonexistent
m {OPERATOR} modelhost
m {OPERATOR} modelhost-admin
u {STRANGER} - - /nonexistent
"""
UNITS = ["modelhostd.service", "modelhostd-control.socket", "modelhostd-handles.socket"]
# For a sandbox that may not raise LimitMEMLOCK= (it lacks CAP_SYS_RESOURCE): what lets the service
# lock memory all the same.
LOCK_BY_CAPABILITY = "[Service]\nCapabilityBoundingSet=CAP_IPC_LOCK\nAmbientCapabilities=CAP_IPC_LOCK\n"
_POWER_OFF = signal.SIGRTMIN + 4


def _hierarchies():
    """Where systemd keeps its groups: the one hierarchy, or with the old layout the two."""
    if (CGROUPS / "cgroup.procs").exists():
        return [CGROUPS]
    return [place for place in (CGROUPS / "systemd", CGROUPS / "unified")
            if (place / "cgroup.procs").exists()]


def memlock_can_be_raised():
    def raise_limit():
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    try:
        return subprocess.run(["true"], preexec_fn=raise_limit, check=False).returncode == 0
    except subprocess.SubprocessError:
        return False


def check():
    """Raises tree.Unavailable when no machine can be had here, as far as can be told beforehand."""
    if os.geteuid() != 0:
        raise tree.Unavailable("needs root, to boot a machine")
    places = _hierarchies()
    if not places:
        raise tree.Unavailable("there is no control group hierarchy for systemd here")
    for place in places:
        probe = place / f"modelhost-probe-{os.getpid()}"
        try:
            probe.mkdir()
            probe.rmdir()
        except OSError as error:
            raise tree.Unavailable(f"no control group can be made: {error}") from None
    for name in tree.NEEDS:
        if not shutil.which(name):
            raise tree.Unavailable(f"there is no {name} (deploy/install-deps --test)")
    done = subprocess.run(["unshare", "--mount", "--pid", "--fork", "--net", "--ipc", "--uts", "true"],
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise tree.Unavailable(f"no namespaces to be had: {done.stderr.strip()}")


def sweep(cache):
    """Removes what earlier runs left; those still running hold a lock."""
    for folder in cache.glob("run-*"):
        try:
            with open(folder / "lock", "a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _end_all(folder.name)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue


def _group_name(run_name):
    return f"modelhost-{run_name}"


def _end_all(run_name):
    """Ends whatever is left in the control groups of a machine, and removes them."""
    groups = [place / _group_name(run_name) for place in _hierarchies()]
    end = time.monotonic() + 10
    while any(group.exists() for group in groups) and time.monotonic() < end:
        for group in groups:
            for folder, _, _ in os.walk(group, topdown=False):
                try:
                    for pid in pathlib.Path(folder, "cgroup.procs").read_text().split():
                        if int(pid) > 1:  # 0 is one that cannot be seen from here.
                            os.kill(int(pid), signal.SIGKILL)
                    os.rmdir(folder)
                except OSError:
                    pass  # Not yet empty, or gone.
        time.sleep(0.02)


def _children(pid):
    return [int(child) for child in
            pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Machine:
    """Boots at once. `build` is a build folder whose products are installed into it."""

    def __init__(self, build):
        build = pathlib.Path(build).resolve()
        cache = tree.cache_folder(build)
        base = tree.cached_tree(cache)
        sweep(cache)
        self.folder = cache / f"run-{os.getpid()}"
        self.folder.mkdir()
        self._lock = open(self.folder / "lock", "w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.root = self.folder / "root"
        self.console = self.folder / "console.log"
        self.leader = None
        self._nspawn = None
        try:
            self._install(base, build)
            self._boot()
        except BaseException:
            self.close()
            raise

    def _install(self, base, build):
        subprocess.run(["cp", "-a", "--reflink=auto", str(base), str(self.root)], check=True)
        done = subprocess.run(["cmake", "--install", str(build), "--prefix", "/usr", "--strip"],
                              env={**os.environ, "DESTDIR": str(self.root)}, capture_output=True,
                              text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"cmake --install: {done.stdout[-500:]}{done.stderr}")
        subprocess.run(["/sbin/ldconfig", "-r", str(self.root)], check=True)
        self._write("etc/sysusers.d/zz-test.conf", USERS)
        subprocess.run(["systemctl", f"--root={self.root}", "--quiet", "enable", *UNITS], check=True)
        if not memlock_can_be_raised():
            print("  LimitMEMLOCK= cannot be raised here: the service gets CAP_IPC_LOCK instead")
            self._write("etc/systemd/system/modelhostd.service.d/memlock.conf", LOCK_BY_CAPABILITY)
        self._write("etc/hostname", "modelhost-test\n")
        self._write("etc/machine-id", "")  # Given at boot.
        files = self.root / TEST_FILES
        files.mkdir(parents=True)
        for source in (*(HERE.parent / "integration" / name
                         for name in ("worker.py", "cabi.py", "models.py")), HERE / "reader.py"):
            shutil.copy(source, files)

    def _write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def _boot(self):
        groups = [place / _group_name(self.folder.name) for place in _hierarchies()]
        for group in groups:
            group.mkdir()

        def enter():
            harness.end_with_us()
            for group in groups:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        # Without CAP_IPC_LOCK nspawn's own filter refuses mlock, whatever the limit.
        with open(self.console, "wb") as out:
            self._nspawn = subprocess.Popen(
                # In a process namespace of its own: whatever ends us ends all that is in it.
                ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc",
                 "systemd-nspawn", "--quiet", f"--directory={self.root}", "--boot", "--register=no",
                 "--keep-unit", "--private-network", "--capability=CAP_IPC_LOCK", "--console=pipe",
                 f"--machine={_group_name(self.folder.name)}"], stdin=subprocess.DEVNULL, stdout=out,
                stderr=out, preexec_fn=enter, start_new_session=True)
        self.leader = self._wait("process 1 of the machine", self._find_leader)
        self._wait("a machine that has booted", self._booted)

    def _wait(self, what, condition):
        def look():
            if self._nspawn.poll() is not None:
                said = self.console.read_text(errors="replace")[-500:].strip()
                if self.leader is None:
                    raise tree.Unavailable(f"systemd-nspawn does not boot here: {said}")
                # It could be had; then it was what is installed into it that ended it.
                raise RuntimeError(f"the machine ended while it booted: {said}")
            return condition()
        return harness.wait_for(what, look, BOOT_DEADLINE_S)

    def _find_leader(self):
        """unshare's child is nspawn, whose child is the systemd of the machine."""
        try:
            for nspawn in _children(self._nspawn.pid):
                for pid in _children(nspawn):
                    if os.path.basename(os.readlink(f"/proc/{pid}/exe")) == "systemd":
                        return pid
        except OSError:
            pass  # Not there yet.
        return None

    def _booted(self):
        state = self.run("systemctl", "is-system-running", check=False).stdout.strip()
        return state in ("running", "degraded")

    def command(self, *arguments, user=None):
        """The command line that runs `arguments` in the machine."""
        enter = ["nsenter", "--target", str(self.leader), "--mount", "--uts", "--ipc", "--net", "--pid"]
        if user:
            enter += ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups",
                      "--inh-caps=-all", "--"]
        return [*enter, *map(str, arguments)]

    def environment(self):
        return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "SYSTEMD_PAGER": "",
                "PYTHONDONTWRITEBYTECODE": "1"}

    def run(self, *arguments, user=None, check=True, deadline_s=180):
        done = subprocess.run(self.command(*arguments, user=user), stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=deadline_s, check=False,
                              env=self.environment(), cwd="/")
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(map(str, arguments))} -> {done.returncode}\n"
                                 f"{done.stdout}{done.stderr}")
        return done

    def start(self, *arguments, user=None):
        return subprocess.Popen(self.command(*arguments, user=user), stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE, text=True, env=self.environment(), cwd="/",
                                preexec_fn=harness.end_with_us)

    def close(self):
        if self._nspawn is not None and self._nspawn.poll() is None:
            if self.leader is not None:
                os.kill(self.leader, _POWER_OFF)
            try:
                self._nspawn.wait(40 if self.leader is not None else 0.1)
            except subprocess.TimeoutExpired:
                self._nspawn.kill()
                self._nspawn.wait()
        _end_all(self.folder.name)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", required=True)
    parser.add_argument("--build", default=str(ROOT / "build" / "release"))
    arguments = parser.parse_args()
    try:
        check()
        tree.cached_tree(tree.cache_folder(arguments.build))
    except tree.Unavailable as why:
        print(why)
        return 77
    return 0


if __name__ == "__main__":
    sys.exit(main())
