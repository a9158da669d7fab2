"""docs/grpc_workers.md: what it shows is in the files that it is about, and its commands run."""
import os
import shutil
import subprocess
import unittest

import newcomer  # noqa: F401  (the folders of harness and case)
import case
import harness
from blocks import Page
from harness import AS_ROOT, CLIENT, ROOT, as_user, environment

PLACES = {"python": ROOT / "client/examples/grpc_worker.py",
          "proto": ROOT / "proto/modelhost/v1/worker.proto", "c": ROOT / "proto/abi/handle_frame.h"}


class Guide(case.Case):
    def setUp(self):
        super().setUp()
        self.page = Page("docs/grpc_workers.md")

    def user_folder(self):
        """What a new user has of the tree."""
        home = self.folder / "home"
        home.mkdir(mode=0o755)
        for name in ("proto", "client/examples"):
            shutil.copytree(ROOT / name, home / name)
        for path in [home, *home.rglob("*")]:
            path.chmod(path.stat().st_mode | 0o055 if path.is_dir() else 0o755)
            if AS_ROOT:
                os.chown(path, CLIENT, CLIENT)
        return home

    def run_in(self, home, text, **env):
        done = subprocess.run(
            ["/bin/sh", "-euc", text], cwd=home, capture_output=True, text=True, check=False,
            timeout=2 * harness.DEADLINE_S, **as_user(CLIENT),
            env=environment(MODELHOST_RUNTIME_DIR=str(self.daemon.runtime), HOME=str(home), **env))
        self.assertEqual(done.returncode, 0, f"{text}\n{done.stdout}{done.stderr}")
        return done.stdout

    def test_what_it_shows_is_taken_from_where_it_says(self):
        for language, path in PLACES.items():
            shown = [block for block in self.page.take(language) if "modelhost.connect" not in block.text]
            self.assertTrue(shown, language)
            for block in shown:
                self.assertIn(block.text, path.read_text(), f"{block.where} is not in {path}")
        self.page.take("sh")  # The other tests'.
        self.assertEqual(self.page.left, [])

    def test_its_commands_work_for_a_new_user(self):
        self.serve("planner", 1)
        home = self.user_folder()
        for block in self.page.take("sh"):
            out = self.run_in(home, block.text)
        self.assertIn("planner@1 generation 1: 4 tensors", out)

    def test_the_generated_modules_and_the_python_client_work_in_one_program(self):
        self.serve("planner", 1)
        home = self.user_folder()
        self.run_in(home, self.page.take("sh")[0].text)
        block = self.page.one("python", "modelhost.connect")
        (home / "both.py").write_text(block.text)
        for order in (f"{harness.PROGRAMS.python}:generated", f"generated:{harness.PROGRAMS.python}"):
            with self.subTest(order):
                out = self.run_in(home, "/usr/bin/python3 -B both.py", PYTHONPATH=order)
                self.assertEqual(out, "planner 1 4\n")


if __name__ == "__main__":
    unittest.main()
