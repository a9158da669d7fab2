"""client/README.md: its programs, built with its CMake lines against what `cmake --install` gives, and run."""
import shutil
import subprocess
import unittest

import newcomer  # noqa: F401  (the folders of harness and case)
import case
import device_case
import harness
from blocks import Page
from harness import CLIENT, as_user, environment, wait_for

# What the page leaves to its reader. One turn of the loop for each byte of the standard input.
USE = """
#include <cstdio>
#include <cstdlib>
template <typename Bytes, typename Shape>
void use(const Bytes& bytes, const Shape& shape) {
  std::printf("%d %zu %zu\\n", static_cast<int>(bytes[0]), bytes.size(), shape.size());
  std::fflush(stdout);
  if (std::getchar() == EOF) std::exit(0);
}
"""
GPU = """
#include <cstdio>
#include "modelhost/modelhost.hpp"
constexpr int kernel = 1;
void launch(int, const void* data) { std::printf("launched %d\\n", data != nullptr); }
int main() {
  auto client = modelhost::Client::Connect().value();
@@
  std::printf("remapped %d\\n", now.ok());
}
"""
PROJECT = """
cmake_minimum_required(VERSION 3.16)
project(node CXX)
add_executable(node node.cc)
"""


def install(folder):
    """libmodelhost, its headers and CMake files below a prefix."""
    subprocess.run(["cmake", "--install", str(harness.PROGRAMS.build / "client/src"), "--prefix",
                    str(folder)], check=True, capture_output=True)
    return folder


def page():
    return Page("client/README.md")


class Twenty(case.Case):
    def test_the_program_builds_with_the_cmake_lines_and_follows_a_swap(self):
        prefix = install(self.folder / "prefix")
        project = self.folder / "node"
        project.mkdir()
        (project / "use.h").write_text(USE)
        (project / "node.cc").write_text(page().one("cpp", "int main()").text)
        (project / "CMakeLists.txt").write_text(PROJECT + page().one("cmake", "find_package").text)
        for command in (["cmake", "-S", project, "-B", project / "build", f"-DCMAKE_PREFIX_PATH={prefix}",
                         f"-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror -include {project / 'use.h'}"],
                        ["cmake", "--build", project / "build"]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        for path in (self.folder, project, project / "build", prefix, prefix / "lib"):
            path.chmod(0o755)
        for version in (1, 2):
            self.serve_tensors("planner", version, {"model.norm.weight": ("U8", [5], bytes([version] * 5))})
        self.ctl("swap", "planner", "--version", 1)
        env = environment(MODELHOST_RUNTIME_DIR=str(self.daemon.runtime))
        del env["LD_LIBRARY_PATH"]
        node = subprocess.Popen([project / "build/node"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, env=env, cwd="/",
                                preexec_fn=harness.end_with_us, **as_user(CLIENT))
        try:
            self.assertEqual(node.stdout.readline(), "1 5 1\n")
            self.ctl("swap", "planner", "--version", 2)

            def turn():
                node.stdin.write("\n")
                node.stdin.flush()
                return node.stdout.readline()
            wait_for("the new version", lambda: turn() == "2 5 1\n")
        finally:
            _, err = node.communicate()
        self.assertEqual((node.returncode, err), (0, ""))

    def test_every_block_is_taken_by_a_test(self):
        blocks = page()
        for language, text in (("cpp", "int main()"), ("cmake", "find_package"), ("cpp", "Want::kDevice"),
                               ("cpp", "live.Remap()")):
            blocks.one(language, text)
        self.assertEqual(blocks.left, [])


class Gpu(device_case.DeviceCase):
    """On the fake driver."""

    def test_the_program_for_a_gpu_and_the_one_for_graphs_run(self):
        if not (harness.PROGRAMS.fakecuda / "libcuda.so.1").exists():
            self.skipTest("the fake driver is not built")
        case.write_tensors(self.folder / "gpu/model.safetensors", {"model.norm.weight": ("U8", [5], b"abcde")})
        self.serve("planner", 1, folder=self.folder / "gpu")
        source = self.folder / "gpu.cc"
        source.write_text(GPU.replace("@@", page().one("cpp", "Want::kDevice").text +
                                      page().one("cpp", "live.Remap()").text))
        program = self.folder / "gpu_node"
        done = subprocess.run(
            ["c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", str(source), "-I",
             str(harness.ROOT / "client/include"), "-L", str(harness.PROGRAMS.lib), "-lmodelhost", "-o",
             str(program)], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        program.chmod(0o755)
        done = subprocess.run(
            [str(program)], capture_output=True, text=True, check=False, cwd="/",
            timeout=2 * harness.DEADLINE_S, **as_user(CLIENT),
            env=environment(**self.fake(MODELHOST_RUNTIME_DIR=str(self.daemon.runtime))))
        self.assertEqual((done.returncode, done.stdout), (0, "launched 1\nremapped 1\n"), done.stderr)


if shutil.which("c++") is None:
    raise unittest.SkipTest("there is no C++ compiler")

if __name__ == "__main__":
    unittest.main()
