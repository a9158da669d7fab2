"""docs/cpp.md as a new user follows it: installed, built by CMake and by pkg-config, and run.

Blocks of C++ with a main() are programs; the others are one program, in their order.
"""
import re
import shutil
import subprocess
import unittest

import newcomer  # noqa: F401  (the folders of harness and case)
import harness
from blocks import Page
from harness import CLIENT, Case, as_user, environment

PIECES = """#include <chrono>
#include <cstdio>
#include <modelhost/modelhost.hpp>
#include <string>
#include <thread>
int main() {
@@
}
"""
# What the comments of the page say that is printed, and what they leave open.
PRINTED = ["planner@1, 4 tensors, safetensors", "I64 [8192], first 0", '{"version":  ...',
           "planner@1 detector@1", "NOT_FOUND: .*layer.0.wieght.*layer.0.weight.*", "no such model",
           "planner@1", ".*"]


class Guide(Case):
    def setUp(self):
        super().setUp()
        self.page = Page("docs/cpp.md")
        self.home = self.folder / "home"
        (self.home / "modelhost/build").mkdir(parents=True)
        (self.home / "modelhost/build/release").symlink_to(harness.PROGRAMS.build)
        self.node = self.home / "node"
        self.node.mkdir()
        for name in ("planner", "detector"):
            self.serve(name, 1)

    def shell(self, text):
        """As the user's own shell, in one home; as root, who alone can read every build folder."""
        env = environment(HOME=str(self.home), MODELHOST_RUNTIME_DIR=str(self.daemon.runtime))
        del env["LD_LIBRARY_PATH"]
        done = subprocess.run(["sh", "-euc", text], capture_output=True, text=True, check=False, env=env,
                              cwd=self.home, timeout=10 * harness.DEADLINE_S)
        self.assertEqual(done.returncode, 0, f"{text}\n{done.stdout}{done.stderr}")
        return done.stdout

    def test_the_programs_build_and_run_as_the_page_says(self):
        (self.node / "node.cc").write_text(self.page.one("cpp", "int main(").text)
        (self.node / "node.c").write_text(self.page.one("c", "int main(").text)
        (self.node / "CMakeLists.txt").write_text(self.page.one("cmake", "find_package").text)
        out = "".join(self.shell(block.text) for block in self.page.take("sh"))
        self.assertEqual(out.count("planner@1 I64 65536 bytes\n"), 3)
        self.assertTrue(out.endswith("planner@1 I64 rank 1\n"), out)
        pieces = [block for block in self.page.take("cpp") if "int main(" not in block.text]
        self.pieces(pieces)
        self.assertEqual(self.page.left, [])

    def pieces(self, blocks):
        prefix = self.home / "prefix"
        source = self.node / "pieces.cc"
        source.write_text(PIECES.replace("@@", "\n".join(
            f'#line {block.line + 1} "{block.page}"\n{block.text}' for block in blocks)))
        self.shell(f"c++ -std=c++17 -Wall -Wextra -Werror -pthread '{source}' -I'{prefix}/include' -L'{prefix}/lib' "
                   f"-Wl,-rpath,'{prefix}/lib' -lmodelhost -o '{self.node}/pieces'")
        # As a user of the group that may read models.
        for path in (self.home, self.node, prefix, prefix / "lib"):
            path.chmod(0o755)
        env = environment(MODELHOST_RUNTIME_DIR=str(self.daemon.runtime))
        done = subprocess.run([str(self.node / "pieces")], capture_output=True, text=True, check=False, env=env,
                              timeout=2 * harness.DEADLINE_S, **as_user(CLIENT))
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        lines = done.stdout.splitlines()
        self.assertEqual(len(lines), len(PRINTED), done.stdout)
        for line, pattern in zip(lines, PRINTED):
            self.assertTrue(line == pattern or re.fullmatch(pattern, line), f"{line!r} is not {pattern!r}")


def setUpModule():
    for tool in ("cmake", "pkg-config", "cc", "c++"):
        if not shutil.which(tool):
            raise unittest.SkipTest(f"there is no {tool}")
    if harness.PROGRAMS.sanitized:
        raise unittest.SkipTest("the library of a sanitizer's build is not for other projects")


if __name__ == "__main__":
    unittest.main()
