"""What the tests of the Python package stand on: a real daemon (tests/integration/harness.py), and
models of every element type."""
import math
import pathlib
import resource
import subprocess
import sys
import textwrap
import unittest

INTEGRATION = pathlib.Path(__file__).resolve().parent.parent / "integration"
sys.path.insert(0, str(INTEGRATION))
import harness  # noqa: E402
import models  # noqa: E402

wait_for = harness.wait_for


def package():
    """The package as it was built; a skip that says why where it was not."""
    folder = harness.PROGRAMS.python
    if not (folder / "modelhost").is_dir():
        raise unittest.SkipTest("the Python package is not built (cmake found no pybind11 2.10 or no "
                                "Python headers, or this is a sanitizer build)")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    import modelhost
    return modelhost


def need(module):
    """An optional module, or a skip that names it."""
    try:
        return __import__(module)
    except ImportError as error:
        raise unittest.SkipTest(f"Debian's python3-{module} is not installed ({error})") from None


# Bytes of one element; an element's value is its number.
SIZES = {"F32": 4, "F64": 8, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "I16": 2, "U16": 2, "I32": 4,
         "U32": 4, "I64": 8, "U64": 8, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8}


def write_tensors(path, tensors, metadata=None):
    """A safetensors file of {name: (dtype, shape, bytes)}."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [(name, dtype, shape, len(data)) for name, (dtype, shape, data) in tensors.items()]
    with open(path, "wb") as out:
        out.write(models.safetensors_header(rows, metadata))
        for _, _, data in tensors.values():
            out.write(data)
    return path


def pattern(dtype, shape, seed=0):
    """Bytes of a tensor: any, but always the same ones; only 0 and 1 for BOOL."""
    count = math.prod(shape) * SIZES[dtype]
    if dtype == "BOOL":
        return bytes((i + seed) % 2 for i in range(count))
    return bytes((i * 7 + seed + 1) % 120 for i in range(count))


def every_type():
    tensors = {}
    for dtype in SIZES:
        shape = [4, 6]
        tensors[f"of.{dtype}"] = (dtype, shape, pattern(dtype, shape))
    tensors["scalar"] = ("F32", [], pattern("F32", []))
    tensors["empty"] = ("F32", [0, 3], b"")
    return tensors


class Case(harness.Case):
    """A daemon, and the package connected to it as a plain user."""

    def setUp(self):
        self.modelhost = package()
        super().setUp()

    def connect(self, daemon=None, keep=True, **options):
        """A client; closed at the end of the test unless `keep` is false: garbage then ends it."""
        with harness.as_peer(harness.CLIENT):
            client = self.modelhost.connect((daemon or self.daemon).runtime, **options)
        if keep:
            self.addCleanup(client.close)
        return client

    def serve_tensors(self, model, version, tensors, metadata=None, files=None):
        folder = self.folder / f"src-{model}-{version}"
        write_tensors(folder / "model.safetensors", tensors, metadata)
        for name, data in (files or {}).items():
            (folder / name).write_bytes(data)
        self.serve(model, version, folder=folder)
        return folder

    def script(self, code, *arguments, expect=0, env=None, limits=None, when=None):
        """Runs `code` in an interpreter of its own, as a plain user: what it printed. It has
        `modelhost`, and `runtime`, the daemon's directory. `when` has what to do when it prints a
        line; then it gets one to read."""
        text = ("import sys\nimport modelhost\n"
                f"runtime = {str(self.daemon.runtime)!r}\n") + textwrap.dedent(code)

        def set_limits():
            harness.end_with_us()
            for name, value in (limits or {}).items():
                resource.setrlimit(getattr(resource, name), (value, value))

        running = subprocess.Popen(
            [sys.executable, "-B", "-X", "faulthandler", "-c", text, *map(str, arguments)],
            stdin=subprocess.PIPE if when else subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, cwd="/", preexec_fn=set_limits,
            env=harness.environment(PYTHONPATH=str(harness.PROGRAMS.python), **(env or {})),
            **harness.as_user(harness.CLIENT))
        with running:
            try:
                for expected, action in (when or {}).items():
                    line = running.stdout.readline().strip()
                    if line != expected:
                        running.kill()
                        self.fail(f"printed {line!r}, not {expected!r}: {running.communicate()[1]}")
                    action()
                    running.stdin.write("\n")
                    running.stdin.flush()
                out, errors = running.communicate(timeout=4 * harness.DEADLINE_S)
            except BaseException:
                running.kill()
                raise
        self.assertEqual(running.returncode, expect,
                         f"exit status of:\n{text}\nstdout: {out}\nstderr: {errors}")
        return out

    def leases(self):
        return len(self.json("leases")["items"])
