"""docs/python.md as a new user follows it: every block is run, in order, in one interpreter."""
import pathlib
import re
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import case  # noqa: E402
import harness  # noqa: E402

GUIDE = harness.ROOT / "docs" / "python.md"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)


class Guide(case.Case):
    def test_every_block_is_of_a_language_that_is_run(self):
        self.assertEqual(set(re.findall(r"^```(\w+)$", GUIDE.read_text(), re.M)), {"python", "sh"})

    def test_the_commands_work(self):
        for block in blocks("sh"):
            # As in the root of a tree where build/release is what is tested.
            root = self.folder / "root"
            (root / "build").mkdir(parents=True)
            (root / "build" / "release").symlink_to(harness.PROGRAMS.python.parent)
            done = subprocess.run(["sh", "-euc", block], cwd=root, capture_output=True, text=True, check=False,
                                  env=harness.environment())
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("Read-only views", done.stdout)

    def test_the_program_runs_and_prints_what_its_comments_say(self):
        case.need("numpy")
        case.need("torch")
        self.serve("planner", 1, seed=0)
        shapes = {"encoder.weight": [16, 8], "encoder.bias": [16], "head.weight": [4, 16], "head.bias": [4]}
        self.serve_tensors("net", 1, {
            name: ("F32", shape, case.pattern("F32", shape)) for name, shape in shapes.items()})
        out = self.script("\n".join(blocks("python")),
                          env={"MODELHOST_RUNTIME_DIR": str(self.daemon.runtime)})
        for line in ("<modelhost.Handle planner@1 as stable, 4 tensors>", "I64 (8192,) 65536",
                     "33550336 False", "torch.int64", "torch.Size([1, 4])", "layer.0.weight"):
            self.assertIn(line, out)
