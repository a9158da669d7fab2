"""docs/quickstart.md: every block, in order, in one shell of a new user who is not root."""
import subprocess
import unittest

import newcomer
import harness
from blocks import Page
from newcomer import Newcomer


class Quickstart(harness.Case):
    start_daemon = False

    def setUp(self):
        super().setUp()
        self.page = Page("docs/quickstart.md")
        self.packages = self.page.one("sh", "deploy/install-deps")
        self.build = self.page.one("sh", "cmake --build")

    def test_its_blocks_work_one_after_the_other(self):
        rest = [block for block in self.page.take("sh", "cpp", "python")
                if block not in (self.packages, self.build)]
        self.assertEqual(self.page.left, [])
        user = Newcomer(self)
        if not (harness.PROGRAMS.python / "modelhost").is_dir():
            self.skipTest("the Python package is not built")
        with newcomer.metrics_port_taken():
            out = user.run(newcomer.as_script(rest))
        for line in ("event=metrics_off", "planner@1", "planner@1: 20 tensors; model.norm.weight has 2048 bytes",
                     "planner 1 20 tensors; BF16 (1024,)", "attached planner@1", "adopted planner@2 after",
                     "modelhost-perce", "config.json"):
            self.assertIn(line, out)
        # Back at version 1: the same file as in the source.
        digest = subprocess.run(["sha256sum", user.clone / "build/planner-v1/config.json"],
                                capture_output=True, text=True, check=True).stdout.split()[0]
        self.assertIn(digest, out)
        self.assertFalse((user.home / ".local/share/modelhost").exists())

    def test_the_tour_that_deploy_quickstart_ends_with_works(self):
        out = Newcomer(self).run("python3 -B deploy/tour.py --build build/release", QUICKSTART_MIB="40",
                                 TMPDIR=str(self.folder / "home"))
        self.assertRegex(out, r"memory of 8 processes .* x the file")
        self.assertRegex(out, r"rollback 2 -> 1 .* the whole command")

    def test_the_packages_are_there_or_asked_for(self):
        check = subprocess.run([harness.ROOT / "deploy/install-deps", "--check"], capture_output=True,
                               text=True, check=False)
        if check.returncode != 0:
            self.skipTest(f"packages are missing here, and a test installs none ({check.stderr.strip()})")
        self.assertEqual(Newcomer(self).run(self.packages.text), "")

    def test_the_build_is_what_the_readme_says_and_works(self):
        self.assertEqual(Page("README.md").one("sh", "cmake --build").text, self.build.text)
        newcomer.run_build(self, self.build)


if __name__ == "__main__":
    unittest.main()
