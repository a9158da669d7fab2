"""The package where `cmake --install` puts it, and the wheel that builds its own library."""
import os
import pathlib
import shutil
import site
import subprocess
import sys
import zipfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import case  # noqa: E402
import harness  # noqa: E402

SOURCES = harness.ROOT / "client" / "python"
VERSION = f"python{sys.version_info[0]}.{sys.version_info[1]}"
DEBIAN = pathlib.Path("/etc/debian_version").exists()
READ = """
import sys, modelhost
with modelhost.connect(sys.argv[1]) as client:
    handle = client.acquire("planner")
    print(modelhost.__file__, handle.version, bytes(handle["layer.0.weight"].view_bytes())[:4].hex())
print([line.split()[-1] for line in open("/proc/self/maps") if "libmodelhost" in line][0])
"""


def install(*arguments, folder="client/python", **env):
    subprocess.run(["cmake", "--install", str(harness.PROGRAMS.build / folder), *map(str, arguments)],
                   check=True, capture_output=True, text=True, env={**os.environ, **env})


class Install(case.Case):
    def read(self, path):
        """What a plain user's program says that finds the package by `path`, and nothing else of ours."""
        self.serve("planner", 1)
        for each in [self.folder, *(self.folder / "prefix").rglob("*")]:
            if each.is_dir():
                each.chmod(0o755)
        done = subprocess.run([sys.executable, "-B", "-c", READ, str(self.daemon.runtime)], text=True,
                              capture_output=True, check=False, cwd="/", **harness.as_user(harness.CLIENT),
                              env={"PYTHONPATH": str(path), "PATH": "/usr/bin:/bin"})
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_an_installed_package_reads_with_the_library_of_its_prefix(self):
        prefix = self.folder / "prefix"
        install("--prefix", prefix, "--component", "python")
        package = prefix / "lib" / VERSION / "site-packages" / "modelhost"
        self.assertTrue((package / "py.typed").exists() and (package / "_native.pyi").exists())
        self.assertEqual([path for path in prefix.rglob("*.so*") if "_native" not in path.name], [],
                         "the component has the package alone")
        install("--prefix", prefix, "--strip", folder="client/src")
        out = self.read(package.parent)
        self.assertIn(f"{package}/__init__.py 1 ", out)
        self.assertRegex(out, rf"(?m)^{prefix}/lib\S*/libmodelhost\.so\.1")

    def test_it_goes_where_that_python_looks(self):
        for prefix, folder in (("/usr", "lib/python3/dist-packages"),
                               ("/usr/local", f"lib/{VERSION}/dist-packages"),
                               ("/opt/robot", f"lib/{VERSION}/site-packages")):
            if not DEBIAN and prefix != "/opt/robot":
                continue
            with self.subTest(prefix):
                root = self.folder / prefix.replace("/", "_")
                install("--prefix", prefix, "--component", "python", DESTDIR=str(root))
                self.assertTrue((root / prefix[1:] / folder / "modelhost/__init__.py").exists())
                if prefix != "/opt/robot":
                    self.assertIn(f"{prefix}/{folder}", site.getsitepackages())

    def test_a_wheel_builds_its_own_library_from_a_clone(self):
        case.need("setuptools")
        case.need("wheel")
        if not shutil.which("ccache"):
            self.skipTest("there is no ccache, and without it this takes minutes")
        clone = self.folder / "clone"
        for part in ("CMakeLists.txt", "client", "daemon", "deploy", "docs", "proto", "systemd",
                     "tests/modelhost_targets.cmake"):
            source, target = harness.ROOT / part, clone / part
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("build", "*.egg-info"))
            else:
                shutil.copy2(source, target)
        prefix = self.folder / "prefix"
        done = subprocess.run(
            [sys.executable, "-c", "import sys, setuptools.build_meta as b; b.build_wheel(sys.argv[1])",
             str(prefix)], cwd=clone / "client" / "python", capture_output=True, text=True, check=False,
            env={**{name: value for name, value in os.environ.items() if name != "MODELHOST_BUILD"},
                 "CMAKE_CXX_COMPILER_LAUNCHER": "ccache", "CCACHE_BASEDIR": str(clone),
                 "CCACHE_NOHASHDIR": "1"})
        self.assertEqual(done.returncode, 0, done.stdout[-3000:] + done.stderr[-3000:])
        (wheel,) = prefix.glob("modelhost-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(prefix / "site")
        out = self.read(prefix / "site")
        self.assertIn(f"{prefix}/site/modelhost/__init__.py 1 ", out)
        self.assertIn(f"\n{prefix}/site/modelhost/libmodelhost.so.1", out)

    def test_what_cannot_be_built_says_so(self):
        case.need("setuptools")
        source = self.folder / "alone" / "client" / "python"
        shutil.copytree(SOURCES, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
        for hook, words in (("build_wheel", ("C++ sources", "MODELHOST_BUILD")),
                            ("build_sdist", ("no source distribution", "pip wheel"))):
            with self.subTest(hook):
                done = subprocess.run(
                    [sys.executable, "-c", f"import sys, setuptools.build_meta as b; b.{hook}(sys.argv[1])",
                     str(self.folder)], cwd=source, capture_output=True, text=True, check=False,
                    env={name: value for name, value in os.environ.items() if name != "MODELHOST_BUILD"})
                self.assertNotEqual(done.returncode, 0)
                for word in words:
                    self.assertIn(word, done.stderr.strip().splitlines()[-1])
                self.assertEqual([*self.folder.glob("*.whl"), *self.folder.glob("*.tar.gz")], [])
