"""A new user with a clone of the tree and a login of their own: the commands of a page, run as they stand
there, in one shell and in order."""
import contextlib
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "integration"), str(HERE.parent / "python")]
import harness  # noqa: E402

# What pages use of a clone. The build is what is tested.
PARTS = ("client", "deploy", "proto", "docs", "CMakeLists.txt", "CMakePresets.json")
METRICS_PORT = 9464
DEADLINE_S = 8 * harness.DEADLINE_S


class Newcomer:
    def __init__(self, case):
        self.case = case
        self.home = case.folder / "home"
        self.clone = self.home / "modelhost"
        self.clone.mkdir(parents=True)
        for part in PARTS:
            source = harness.ROOT / part
            if source.is_dir():
                shutil.copytree(source, self.clone / part,
                                ignore=shutil.ignore_patterns("build", "__pycache__", "*.egg-info"))
            else:
                shutil.copy2(source, self.clone / part)
        release = self.clone / "build" / "release"
        release.mkdir(parents=True)
        for name, folder in (("bin", harness.PROGRAMS.bin), ("lib", harness.PROGRAMS.lib),
                             ("python", harness.PROGRAMS.python)):
            (release / name).symlink_to(folder)
        runtime = self.home / "run"
        runtime.mkdir()
        for path in [self.home, *self.home.rglob("*")]:
            if path.is_symlink():
                continue
            path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
            if harness.AS_ROOT:
                os.chown(path, harness.CLIENT, harness.CLIENT)
        runtime.chmod(0o700)
        self.env = harness.environment(HOME=str(self.home), XDG_RUNTIME_DIR=str(runtime))
        if harness.PROGRAMS.bin == harness.PROGRAMS.build / "bin":
            # Programs find the library by themselves where they were built; copies of them do not.
            del self.env["LD_LIBRARY_PATH"]

    def run(self, script, expect=0, **env):
        """What a script printed, both outputs in one. Whatever it started is ended with it."""
        text = ("set -eu\ntrap 'pids=$(jobs -p); [ -z \"$pids\" ] || { kill $pids; wait; } 2>/dev/null' EXIT\n"
                + script)
        done = subprocess.Popen(
            ["bash", "-c", text], cwd=self.clone, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", env={**self.env, **env},
            start_new_session=True, preexec_fn=harness.end_with_us, **harness.as_user(harness.CLIENT))
        try:
            out, _ = done.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, 9)
            out, _ = done.communicate()
            self.case.fail(f"not done after {DEADLINE_S} s:\n{script}\n{out}")
        self.case.assertEqual(done.returncode, expect, f"{script}\n---\n{out[-6000:]}")
        return out


def as_script(blocks):
    """Blocks of a page as one shell script. A program says in its first line where it is saved."""
    parts = []
    for block in blocks:
        if block.language == "sh":
            parts.append(f"# {block.where}\n{block.text}")
        else:
            name = re.match(r"(?:#|//|/\*) (\S+\.\w+)", block.text)
            if not name:
                raise AssertionError(f"{block.where}: its first line does not name its file")
            parts.append(f"cat > {name[1]} <<'END_OF_{block.line}'\n{block.text}END_OF_{block.line}\n")
    return "".join(parts)


@contextlib.contextmanager
def metrics_port_taken():
    """Somebody else has the port that a daemon without a configuration would listen on."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(("127.0.0.1", METRICS_PORT))
            other.listen(1)
        except OSError:
            pass  # Then somebody else really has it.
        yield


def run_build(case, block):
    """The block that builds, in this tree: only where it has nothing left to do, as tests/run leaves it."""
    release = harness.ROOT / "build" / "release"
    if harness.PROGRAMS.build != release.resolve():
        case.skipTest(f"{block.where}: what is tested is {harness.PROGRAMS.build}, not build/release")
    idle = subprocess.run(["ninja", "-C", str(release), "-n"], capture_output=True, text=True, check=False)
    if "no work to do" not in idle.stdout:
        case.skipTest(f"{block.where}: build/release is not up to date, and a build would take minutes "
                      "(cmake --build --preset release)")
    done = subprocess.run(["sh", "-euc", block.text], cwd=harness.ROOT, capture_output=True, text=True,
                          check=False)
    case.assertEqual(done.returncode, 0, f"{block.text}\n{done.stdout[-3000:]}{done.stderr}")
