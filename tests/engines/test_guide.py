"""docs/exec.md as a new user follows it: every block is run, as a plain user, in one folder."""
import configparser
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "docs")]
import engine_case  # noqa: E402
import engine_models  # noqa: E402
import harness  # noqa: E402
import models  # noqa: E402
from blocks import Page  # noqa: E402

PAGE = Page("docs/exec.md")
FILE_NAME = re.compile(r"(?:#|//) ([\w-]+\.\w+)\n")


def blocks(*languages):
    return [block.text for block in PAGE.take(*languages)]


def needs_engine(block):
    return re.search(r"\bnode\b", block) is not None


class Guide(engine_case.Case):
    def setUp(self):
        super().setUp()
        self.daemon_with("sealed", "detector")
        self.serve("planner", 1)
        self.place = self.folder / "user"
        self.place.mkdir()
        for block in blocks("js", "python"):
            (self.place / FILE_NAME.match(block).group(1)).write_text(block)
        if harness.AS_ROOT:
            os.chown(self.place, harness.CLIENT, harness.CLIENT)

    def environment(self):
        return harness.environment(PATH=f"{harness.PROGRAMS.bin}:{os.environ['PATH']}",
                                   MODELHOST_RUNTIME_DIR=str(self.daemon.runtime), **self.engines.environment())

    def run_block(self, block):
        done = subprocess.run(["sh", "-euc", block], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
                              cwd=self.place, timeout=4 * harness.DEADLINE_S, env=self.environment(),
                              **harness.as_user(harness.CLIENT))
        self.assertEqual(done.returncode, 0, f"{block}\n{done.stdout}{done.stderr}")
        return done.stdout

    def test_no_block_is_left_over(self):
        blocks("sh", "js", "python", "ini")
        self.assertEqual(PAGE.left, [])

    def test_the_commands_work(self):
        engine_case.need("numpy")
        out = [self.run_block(block) for block in blocks("sh") if not needs_engine(block)]
        version = self.daemon.store / "models/planner/versions/1"
        self.assertIn(models.sha256(version / "model.safetensors"), out[0])
        self.assertRegex(out[0], r"modelctl-exec-\w+/tokenizer\.json")
        self.assertIn("config.json\nmodel.safetensors\ntokenizer.json\n", out[0])
        self.assertRegex(out[1], r"^/\S+/tokenizer\.json\n$")
        self.assertEqual(out[2], "(8192,) 1\n")
        self.assertTrue(os.access(self.place / "on-swap.sh", os.X_OK))

    def test_the_engines_commands_work(self):
        self.engines.node(least=20)
        (self.place / "node_modules").symlink_to(self.engines.environment()["NODE_PATH"])
        engine_models.write_llama(self.folder / "chat" / "chat.gguf")
        self.serve("chat", 1, folder=self.folder / "chat")
        self.serve("detector", 1, folder=engine_models.write_onnx(self.folder / "detector", external=True))
        out = [self.run_block(block) for block in blocks("sh") if needs_engine(block)]
        self.assertRegex(out[0], r"(\d+\n){8}$")
        self.assertEqual(out[1], "4 x 16\n")

    def test_a_command_runs_whenever_the_label_moves(self):
        for block in blocks("sh"):
            if "on-swap.sh" in block:
                self.run_block(block)
        self.publish("planner", 2)
        watcher = subprocess.Popen(["./on-swap.sh", "planner", "sh", "-c", "echo moved >> moved"], cwd=self.place,
                                   stdin=subprocess.DEVNULL, env=self.environment(), start_new_session=True,
                                   **harness.as_user(harness.CLIENT))
        self.addCleanup(watcher.wait)
        self.addCleanup(os.killpg, watcher.pid, signal.SIGKILL)
        ran = self.place / "moved"
        lines = lambda: len(ran.read_text().splitlines()) if ran.exists() else 0

        def swap_until(count):
            """It may not have begun to follow yet, so that one swap is not enough."""
            row = next(row for row in self.json("ls")["items"] if row["name"] == "planner")
            newest = row["labels"][0]["version"]
            self.ctl("swap", "planner", "--version", 3 - newest)
            return lines() >= count

        engine_case.wait_for("the first command", lambda: swap_until(1))
        engine_case.wait_for("another one", lambda: swap_until(2))
        self.assertIsNone(watcher.poll())
        moves = [event for event in self.json("events", "--model", "planner")["items"] if event["what"] == "label"]
        self.assertLessEqual(lines(), len(moves), "labels alone")

    def test_the_units_are_units_and_start_what_they_say(self):
        units = {FILE_NAME.match(block).group(1): block for block in blocks("ini")}
        self.assertEqual(set(units), {"chat.service", "chat-swap.service"})
        for name, text in units.items():
            if shutil.which("systemd-analyze"):
                for program in ("/usr/bin/modelctl", "/usr/local/bin/on-swap.sh"):
                    text = text.replace(program, harness.PROGRAMS.ctl)
                (self.folder / name).write_text(text.replace("Wants=modelhostd.service\n", ""))
                done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(self.folder / name)], capture_output=True,
                                      text=True, check=False, timeout=harness.DEADLINE_S)
                self.assertEqual([line for line in done.stderr.splitlines() if name in line], [], done.stderr)
        engine_models.write_llama(self.folder / "chat" / "chat.gguf")
        self.serve("chat", 1, folder=self.folder / "chat")
        unit = configparser.ConfigParser(interpolation=None, strict=False)
        unit.optionxform = str
        unit.read_string(units["chat.service"])
        command = shlex.split(unit["Service"]["ExecStart"])
        command[command.index("/usr/bin/llama-server")] = "/bin/echo"
        done = subprocess.run([harness.PROGRAMS.ctl, *command[1:]], capture_output=True, text=True, check=False,
                              timeout=2 * harness.DEADLINE_S, env=self.environment(), cwd="/",
                              **harness.as_user(harness.CLIENT))
        self.assertRegex(done.stdout, r"^-m /\S+/chat\.gguf\n$", done.stderr)
