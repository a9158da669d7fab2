"""docs/python.md as a new user follows it: every block is run, in order, in one interpreter."""
import subprocess
import unittest

import newcomer  # noqa: F401  (the folders of harness and case)
import case
import harness
from blocks import Page


class Guide(case.Case):
    def setUp(self):
        super().setUp()
        self.page = Page("docs/python.md")

    def test_the_commands_work(self):
        # As in the root of a tree where build/release is what is tested.
        root = self.folder / "root"
        (root / "build").mkdir(parents=True)
        (root / "build" / "release").symlink_to(harness.PROGRAMS.python.parent)
        for block in self.page.take("sh"):
            done = subprocess.run(["sh", "-euc", block.text], cwd=root, capture_output=True, text=True,
                                  check=False, env=harness.environment())
            self.assertEqual(done.returncode, 0, f"{block.where}: {done.stderr}")
            self.assertIn("Read-only views", done.stdout)

    def test_the_program_runs_and_prints_what_its_comments_say(self):
        case.need("numpy")
        case.need("torch")
        self.serve("planner", 1, seed=0)
        shapes = {"encoder.weight": [16, 8], "encoder.bias": [16], "head.weight": [4, 16], "head.bias": [4]}
        self.serve_tensors("net", 1, {
            name: ("F32", shape, case.pattern("F32", shape)) for name, shape in shapes.items()})
        program = self.page.take("python")
        self.page.take("sh")  # The other test's.
        self.assertEqual(self.page.left, [])
        out = self.script("\n".join(block.text for block in program),
                          env={"MODELHOST_RUNTIME_DIR": str(self.daemon.runtime)})
        for line in ("<modelhost.Handle planner@1 as stable, 4 tensors>", "I64 (8192,) 65536",
                     "33550336 False", "torch.int64", "torch.Size([1, 4])", "layer.0.weight"):
            self.assertIn(line, out)


if __name__ == "__main__":
    unittest.main()
