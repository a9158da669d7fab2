"""Programs of other projects: what is installed, and that CMake and pkg-config find it wherever it is.

The build's component `client` is installed into a folder of its own and moved from there, so that
nothing can be found by accident. docs/cpp.md and docs/ros.md are run by test_docs_cpp.py and
test_ros_packages.py.
"""
import pathlib
import re
import shlex
import shutil
import subprocess
import tempfile
import unittest

import harness
from harness import Case

ROOT = harness.ROOT
INSTALLED = [
    "include/modelhost/modelhost.h", "include/modelhost/modelhost.hpp",
    "lib/cmake/modelhost/modelhostConfig.cmake", "lib/cmake/modelhost/modelhostConfigVersion.cmake",
    "lib/cmake/modelhost/modelhostTargets-BUILD.cmake", "lib/cmake/modelhost/modelhostTargets.cmake",
    "lib/libmodelhost.so", "lib/libmodelhost.so.1", "lib/libmodelhost.so.1.0.0",
    "lib/pkgconfig/modelhost.pc"]

C_PROGRAM = r"""
#include <modelhost/modelhost.h>
#include <stdio.h>

int main(void) {
  mh_error error;
  mh_handle* planner = NULL;
  mh_tensor_view view = MH_TENSOR_VIEW_INIT;
  mh_client* client = mh_connect(NULL, &error);
  if (client == NULL || mh_acquire(client, "planner", NULL, &planner, &error) != MH_OK) {
    fprintf(stderr, "%s\n", error.message);
    return 1;
  }
  if (mh_tensor(planner, "layer.0.weight", &view) != MH_OK) return 1;
  printf("C %s %llu\n", view.dtype, (unsigned long long)view.nbytes);
  mh_release(planner);
  mh_disconnect(client);
  return 0;
}
"""
# Beside libraries that the daemon uses too, of the program's own choice.
CPP_PROGRAM = r"""
#include <absl/strings/str_cat.h>
#include <grpc/grpc.h>

#include <cstdio>
#include <modelhost/modelhost.hpp>

static_assert(__cplusplus == 201703L, "the header is C++17");

int main() {
  grpc_init();
  auto model = modelhost::Client::Connect().value().Acquire("planner").value();
  const auto weight = model.Tensor("layer.0.weight").value();
  std::puts(absl::StrCat("C++ ", model.name(), " ", weight.Values<int64_t>().value()[1],
                         grpc_version_string() == nullptr ? " no" : " with", " gRPC").c_str());
  grpc_shutdown();
}
"""
PROJECT = """cmake_minimum_required(VERSION 3.22)
project(consumer LANGUAGES C CXX)
set(CMAKE_C_STANDARD 99)
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_EXTENSIONS OFF)
add_compile_options(-Wall -Wextra -Wpedantic -Werror)
find_package(absl REQUIRED)
find_package(gRPC CONFIG REQUIRED)
find_package(modelhost 0.1 CONFIG REQUIRED)
find_package(modelhost REQUIRED)
add_executable(in_c in_c.c)
target_link_libraries(in_c PRIVATE modelhost::modelhost)
add_executable(in_cpp in_cpp.cc)
target_link_libraries(in_cpp PRIVATE absl::strings gRPC::grpc modelhost::modelhost)
"""
QUESTIONS = """cmake_minimum_required(VERSION 3.22)
project(questions LANGUAGES C)
foreach(request "0.1" "0.1.0" "0" "0.1.0 EXACT" "0.1...<1" "0.2" "1" "0.0.9 EXACT"
                "COMPONENTS" "COMPONENTS;device" "OPTIONAL_COMPONENTS;device")
  string(REPLACE " " ";" words "${request}")
  unset(modelhost_DIR CACHE)
  find_package(modelhost ${words} QUIET)
  message(STATUS "ASKED ${request} = ${modelhost_FOUND} ${modelhost_VERSION}")
endforeach()
"""


def installed_prefix(folder):
    """`folder`/P, after an installation somewhere else."""
    first, moved = folder / "first", folder / "moved here" / "P"
    run(["cmake", "--install", str(harness.PROGRAMS.build), "--prefix", str(first), "--component", "client"])
    moved.parent.mkdir()
    first.rename(moved)
    return moved


def run(command, **options):
    """Its output; a failure shows all of it."""
    options.setdefault("env", harness.environment())
    options["env"].pop("LD_LIBRARY_PATH", None)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace", check=False, timeout=10 * harness.DEADLINE_S, **options)
    if done.returncode != 0:
        raise AssertionError(f"{shlex.join(map(str, command))}: {done.returncode}\n{done.stdout}")
    return done.stdout


class Installed(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls._folder = tempfile.TemporaryDirectory(prefix="modelhost-install-")
        cls.addClassCleanup(cls._folder.cleanup)
        cls.folder = pathlib.Path(cls._folder.name)
        cls.prefix = installed_prefix(cls.folder)

    def test_the_client_is_these_files_and_no_others(self):
        files = sorted(path.relative_to(self.prefix).as_posix() for path in self.prefix.rglob("*")
                       if not path.is_dir())
        self.assertEqual([re.sub(r"Targets-\w+", "Targets-BUILD", name) for name in files], INSTALLED)

    def test_nothing_names_the_folders_that_it_was_built_in(self):
        for path in self.prefix.rglob("*"):
            if not path.is_file() or path.suffix not in (".cmake", ".pc", ".h", ".hpp"):
                continue
            text = path.read_text()
            for folder in (ROOT, harness.PROGRAMS.build, self.folder / "first"):
                with self.subTest(f"{path.name} {folder}"):
                    self.assertNotIn(str(folder), text)
        dynamic = run(["readelf", "-d", str(self.prefix / "lib/libmodelhost.so")])
        self.assertNotRegex(dynamic, "RPATH|RUNPATH")
        self.assertIn("Library soname: [libmodelhost.so.1]", dynamic)

    def test_the_cmake_package_needs_nothing_else(self):
        for name in ("Config", "Targets"):
            text = (self.prefix / f"lib/cmake/modelhost/modelhost{name}.cmake").read_text()
            self.assertNotRegex(text, r"find_dependency|find_package\s*\(")
        self.assertNotRegex(text, r"absl|gRPC|protobuf|CUDA|Threads::|mh_client_objects")
        self.assertIn("modelhost::modelhost", text)

    def test_versions_and_components_that_are_asked_for(self):
        source = self.folder / "questions"
        source.mkdir()
        (source / "CMakeLists.txt").write_text(QUESTIONS)
        text = run(["cmake", "-S", str(source), "-B", str(source / "build"), "-G", "Ninja",
                    f"-DCMAKE_PREFIX_PATH={self.prefix}"])
        answers = dict(re.findall(r"ASKED (.+) = (\w+)", text))
        self.assertEqual(answers, {
            "0.1": "1", "0.1.0": "1", "0": "1", "0.1.0 EXACT": "1", "0.1...<1": "1",
            "0.2": "0", "1": "0", "0.0.9 EXACT": "0",
            "COMPONENTS": "1", "COMPONENTS;device": "0", "OPTIONAL_COMPONENTS;device": "1"})

    def test_the_version_is_everywhere_the_same(self):
        version = re.search(r"project\(modelhost VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())[1]
        asked = run(["pkg-config", "--modversion", "modelhost"], env=self.pkg_config())
        self.assertEqual(asked.strip(), version)
        for manifest in (ROOT / "client/ros").glob("*/package.xml"):
            self.assertIn(f"<version>{version}</version>", manifest.read_text())

    def pkg_config(self):
        return harness.environment(PKG_CONFIG_PATH=str(self.prefix / "lib/pkgconfig"))

    def test_pkg_config_is_valid_and_moves_with_its_prefix(self):
        run(["pkg-config", "--validate", "modelhost"], env=self.pkg_config())
        words = shlex.split(run(["pkg-config", "--cflags", "--libs", "modelhost"], env=self.pkg_config()))
        folders = {word[:2]: pathlib.Path(word[2:]).resolve() for word in words if word[:2] in ("-I", "-L")}
        self.assertEqual(folders, {"-I": self.prefix / "include", "-L": self.prefix / "lib"})
        self.assertIn("-lmodelhost", words)


class Consumers(Case):
    def test_c_and_cpp_programs_find_it_in_a_moved_prefix_beside_their_own_absl_and_grpc(self):
        self.serve("planner", 1)
        prefix = installed_prefix(self.folder)
        source = self.folder / "consumer"
        source.mkdir()
        for name, text in (("CMakeLists.txt", PROJECT), ("in_c.c", C_PROGRAM), ("in_cpp.cc", CPP_PROGRAM)):
            (source / name).write_text(text)
        build = source / "build"
        run(["cmake", "-S", str(source), "-B", str(build), "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}"])
        run(["cmake", "--build", str(build)])
        # By pkg-config too, without CMake.
        flags = shlex.split(run(["pkg-config", "--cflags", "--libs", "modelhost"],
                                env=harness.environment(PKG_CONFIG_PATH=str(prefix / "lib/pkgconfig"))))
        run(["cc", "-std=c99", "-Wall", "-Werror", str(source / "in_c.c"), "-o", str(build / "by_pkg_config"),
             *flags, f"-Wl,-rpath,{prefix}/lib"])
        # Not the library of the build, even if it is there to be found.
        for program in (build / "in_c", build / "in_cpp", build / "by_pkg_config"):
            self.assertIn(str(prefix), run(["ldd", str(program)]))
        env = harness.environment(MODELHOST_RUNTIME_DIR=str(self.daemon.runtime))
        reader = harness.as_user(harness.CLIENT)
        for path in (self.folder, prefix.parent, source, build):
            path.chmod(0o755)
        self.assertEqual(run([str(build / "in_c")], env=env, **reader), "C I64 65536\n")
        self.assertEqual(run([str(build / "by_pkg_config")], env=env, **reader), "C I64 65536\n")
        self.assertEqual(run([str(build / "in_cpp")], env=env, **reader), f"C++ planner@1 {(1 << 32) | 1} with gRPC\n")

    def test_a_prefix_without_the_library_is_said_so(self):
        prefix = installed_prefix(self.folder)
        (prefix / "lib/libmodelhost.so.1.0.0").unlink()
        source = self.folder / "consumer"
        source.mkdir()
        (source / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.22)\nproject(broken LANGUAGES C)\n"
            "find_package(modelhost REQUIRED)\n")
        with self.assertRaisesRegex(AssertionError, r"libmodelhost\.so"):
            run(["cmake", "-S", str(source), "-B", str(source / "build"), f"-DCMAKE_PREFIX_PATH={prefix}"])


def setUpModule():
    for tool in ("cmake", "ninja", "pkg-config", "cc", "c++", "readelf"):
        if not shutil.which(tool):
            raise unittest.SkipTest(f"there is no {tool}")
    if harness.PROGRAMS.sanitized:
        raise unittest.SkipTest("the library of a sanitizer's build is not for other projects")


if __name__ == "__main__":
    unittest.main()
