"""The package as a distribution: type stubs, docstrings, the wheel, what the extension needs."""
import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys
import unittest
import zipfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import case  # noqa: E402
import harness  # noqa: E402

SOURCES = harness.ROOT / "client" / "python"

USE = '''
from typing import Optional, Union

import modelhost
from modelhost import torch as mt

with modelhost.connect(timeout=1.5) as client:
    handle = client.acquire("planner", wait=True)
    names: list[str] = list(handle)
    tensor: modelhost.Tensor = handle["w"]
    shape: tuple[int, ...] = tensor.shape
    for name, each in handle.items():
        size: int = each.nbytes
        text: str = name
    file = handle.file("tokenizer.json")
    data: memoryview = file.data
    content: bytes = bytes(file) + bytes(tensor)
    found: Optional[modelhost.Tensor] = handle.get("w")
    other: Union[modelhost.Tensor, int] = handle.get("w", 7)
    again: bool = ("w", tensor) in handle.items()
    with open(file) as opened:
        first: str = opened.readline()
    live: modelhost.Live = client.follow("planner")
    try:
        live.adopt().torch()
    except modelhost.NotFound as error:
        status: str = error.status
'''
MISUSE = {
    'modelhost.connect().acquire(7)\n': "arg-type",
    'modelhost.connect().acquire("a", True)\n': "call-arg|misc",
    'modelhost.connect().acquire("a")["w"].shap\n': "attr-defined",
    'x: int = modelhost.connect().acquire("a")["w"].dtype\n': "assignment",
}


class Types(unittest.TestCase):
    def setUp(self):
        self.modelhost = case.package()
        import tempfile
        self._folder = tempfile.TemporaryDirectory(prefix="modelhost-test-")
        self.addCleanup(self._folder.cleanup)
        self.folder = pathlib.Path(self._folder.name)

    def mypy(self, *arguments):
        case.need("mypy")
        done = subprocess.run(
            [sys.executable, "-m", "mypy", "--strict", "--config-file", str(SOURCES / "pyproject.toml"),
             "--cache-dir", str(harness.PROGRAMS.build / "mypy"), *arguments],
            capture_output=True, text=True, check=False, cwd=self.folder,
            env={**os.environ, "MYPYPATH": str(SOURCES)})
        return done.returncode, done.stdout + done.stderr

    def test_mypy_strict_finds_nothing_in_the_package(self):
        code, out = self.mypy("-p", "modelhost")
        self.assertEqual(code, 0, out)

    def test_programs_that_use_it_well_are_clean_and_others_are_not(self):
        (self.folder / "use.py").write_text(USE)
        code, out = self.mypy("use.py")
        self.assertEqual(code, 0, out)
        for number, (text, error) in enumerate(MISUSE.items()):
            path = self.folder / f"misuse{number}.py"
            path.write_text("import modelhost\n" + text)
            with self.subTest(text):
                code, out = self.mypy(path.name)
                self.assertEqual(code, 1, out)
                self.assertRegex(out, rf"\[({error})\]")

    def test_the_guide_is_clean_too(self):
        """Its functions have no annotations, and neither has what they call."""
        guide = (harness.ROOT / "docs" / "python.md").read_text()
        (self.folder / "guide.py").write_text(
            "\n".join(re.findall(r"^```python\n(.*?)^```$", guide, re.M | re.S)))
        code, out = self.mypy("--allow-untyped-defs", "--allow-untyped-calls", "guide.py")
        self.assertEqual(code, 0, out)

    def test_the_stub_of_the_extension_names_what_is_there_and_nothing_else(self):
        import ast
        from modelhost import _native
        stub = ast.parse((SOURCES / "modelhost" / "_native.pyi").read_text())
        classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
        ignored = {"__buffer__"}  # Of Python 3.12.

        def parameters(function):
            """(name, whether by name alone, whether it has a default) of each but self."""
            given = function.args
            places = [*given.posonlyargs, *given.args]
            plain = len(places) - len(given.defaults)
            return [(each.arg, False, i >= plain) for i, each in enumerate(places)][1:] + [
                (each.arg, True, default is not None) for each, default in zip(given.kwonlyargs, given.kw_defaults)]

        compared = 0
        for name, node in classes.items():
            made = getattr(_native, name)
            promised = {item.name for item in node.body if isinstance(item, ast.FunctionDef)} - ignored
            there = {each for each in vars(made) if not each.startswith("__")}
            with self.subTest(name):
                self.assertEqual({each for each in promised if not hasattr(made, each)}, set())
                self.assertEqual(there - promised, set())
            for item in node.body:
                decorated = isinstance(item, ast.FunctionDef) and item.decorator_list
                if not isinstance(item, ast.FunctionDef) or decorated or item.name in ignored:
                    continue
                # What pybind11 has said of itself: one signature, unless it is overloaded.
                line = (getattr(made, item.name).__doc__ or "").partition("\n")[0]
                if not line.startswith(item.name + "("):
                    continue
                with self.subTest(f"{name}.{item.name}"):
                    real, = ast.parse(f"def {line}: ...").body
                    has = parameters(real)
                    # What has no name there is given by its place, whatever the stub calls it.
                    said = [("arg" if each[0].startswith("arg") else one[0], *one[1:])
                            for one, each in zip(parameters(item), has)]
                    self.assertEqual(said, [("arg" if each[0].startswith("arg") else each[0], *each[1:])
                                            for each in has])
                    self.assertEqual(len(parameters(item)), len(has))
                    compared += 1
        self.assertGreater(compared, 20)
        public = {name for name in vars(_native) if not name.startswith("__")}
        functions = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
        self.assertEqual(public, set(classes) | functions)

    def test_everything_public_has_a_docstring(self):
        for name in self.modelhost.__all__:
            made = getattr(self.modelhost, name)
            if isinstance(made, type) and issubclass(made, Exception):
                continue
            with self.subTest(name):
                self.assertTrue(inspect.getdoc(made))
                self.assertEqual(made.__module__, "modelhost")
                for each, value in vars(made).items():
                    if not each.startswith("_") and each not in ("model", "version", "closed"):
                        text = inspect.getdoc(value) or ""
                        # pybind11 writes signatures by itself.
                        text = re.sub(rf"^{each}\(.*", "", text).strip()
                        self.assertTrue(text, each)

    def test_the_extension_needs_the_c_library_and_no_other_of_ours(self):
        (extension,) = (harness.PROGRAMS.python / "modelhost").glob("_native*.so")
        out = subprocess.run(["readelf", "-d", extension], capture_output=True, text=True, check=True).stdout
        needed = set(re.findall(r"NEEDED.*\[([^.\]]+)", out))
        self.assertLessEqual(needed, {"libmodelhost", "libstdc++", "libgcc_s", "libc", "libm", "ld-linux-x86-64"})
        self.assertIn("libmodelhost", needed)

    def test_a_wheel_has_all_it_needs_and_works_anywhere(self):
        case.need("setuptools")
        case.need("wheel")
        source = self.folder / "source"
        shutil.copytree(SOURCES, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
        out = self.folder / "wheels"
        out.mkdir()
        subprocess.run(
            [sys.executable, "-c", "import sys, setuptools.build_meta as b; b.build_wheel(sys.argv[1])",
             str(out)], cwd=source, check=True, capture_output=True,
            env={**os.environ, "MODELHOST_BUILD": str(harness.PROGRAMS.build)})
        (wheel,) = out.glob("modelhost-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            archive.extractall(self.folder / "site")
        for name in ("__init__.py", "torch.py", "py.typed", "_native.pyi", "libmodelhost.so.1"):
            self.assertIn(f"modelhost/{name}", names)
        self.assertIn("linux", wheel.name)
        done = subprocess.run(
            [sys.executable, "-B", "-c",
             "import modelhost\n"
             "try: modelhost.connect('/nowhere', timeout=0.01)\n"
             "except modelhost.Unavailable as error: print(error)\n"
             "print([l.split()[-1] for l in open('/proc/self/maps') if 'libmodelhost' in l][0])"],
            capture_output=True, text=True, check=False, cwd="/",
            env={"PYTHONPATH": str(self.folder / "site"), "PATH": "/usr/bin:/bin"})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("/nowhere", done.stdout)
        self.assertIn(str(self.folder / "site"), done.stdout)

    def test_version_numbers_agree(self):
        (version,) = re.findall(r'^version = "(.*)"', (SOURCES / "pyproject.toml").read_text(), re.M)
        self.assertIn(f"project(modelhost VERSION {version} ", (harness.ROOT / "CMakeLists.txt").read_text())
