"""README.md: its five minutes and its programs, as a new user runs them."""
import unittest

import newcomer
import harness
from blocks import Page
from newcomer import Newcomer


class Readme(harness.Case):
    start_daemon = False

    def test_five_minutes_and_the_programs_after_them(self):
        page = Page("README.md")
        page.one("sh", "cmake --build")  # Run by test_quickstart.py, whose block is the same.
        life = page.one("sh", "modelhostd &")
        (program,) = page.take("c")
        compiled = page.one("sh", "cc node.c")
        (python,) = page.take("python")
        self.assertEqual(page.left, [])
        script = newcomer.as_script([life, program, compiled])
        with_torch = (harness.PROGRAMS.python / "modelhost").is_dir() and has("torch")
        if with_torch:
            script += ("PYTHONPATH=build/release/python python3 - <<'END'\n" + python.text +
                       "print('state_dict of', len(state_dict), state_dict['model.norm.weight'].shape)\nEND\n")
        with newcomer.metrics_port_taken():
            out = Newcomer(self).run(script)
        for line in ("event=metrics_off", "attached planner@1", "adopted planner@2", "BF16, 2048 bytes at 0x"):
            self.assertIn(line, out)
        if not with_torch:
            self.skipTest(f"{python.where}: torch or the Python package is not there; all else was run")
        self.assertIn("state_dict of 20 torch.Size([1024])", out)


def has(module):
    import importlib.util
    return importlib.util.find_spec(module) is not None


if __name__ == "__main__":
    unittest.main()
