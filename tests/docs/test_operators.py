"""The pages for operators: their commands on a real daemon, their configurations checked by it, their units by
systemd."""
import pathlib
import re
import shutil
import subprocess
import unittest

import newcomer  # noqa: F401  (the folders of harness and case)
import case
import harness
import models
import test_bindings
from blocks import Page
from harness import EXIT_DEGRADED, EXIT_OK, EXIT_OTHER, OPERATOR, ROOT, as_user, environment, wait_for


class Commands(harness.Case):
    """Blocks of commands, run by an operator in a folder of their own that has what they name."""

    def setUp(self):
        super().setUp()
        self.work = self.folder / "work"
        self.work.mkdir()

    def shell(self, text, expect=(EXIT_OK,), shell="sh", path=""):
        self.give(self.work)
        for tool in self.work.glob("bin/*"):
            tool.chmod(0o755)
        done = subprocess.run(
            [shell, "-euc", text], cwd=self.work, capture_output=True, text=True, check=False,
            timeout=4 * harness.DEADLINE_S, **as_user(OPERATOR),
            env=environment(MODELHOST_RUNTIME_DIR=str(self.daemon.runtime), HOME=str(self.work),
                            PATH=f"{path}{harness.PROGRAMS.bin}:/usr/bin:/bin"))
        self.assertIn(done.returncode, expect, f"{text}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def stable(self, model):
        return [row["version"] for row in self.json("label", "ls")["items"]
                if (row["model"], row["label"]) == (model, "stable")]

    def test_operations(self):
        page = Page("docs/operations.md")
        models.simple_model(self.work / "planner-v8", 8)
        self.serve("planner", 7)
        self.serve("detector", 3)
        self.publish("detector", 4)
        self.assertIn("planner@8", self.shell(page.one("sh", "modelctl publish").text))
        out = self.shell(page.one("sh", "--set detector=4").text)
        self.assertIn("planner:stable 7 -> 8", out)
        self.assertEqual((self.stable("planner"), self.stable("detector")), ([7], [4]))
        self.shell(page.one("sh", "--allow-downtime").text)
        self.assertEqual(self.stable("planner"), [8])
        page.take("toml", "ini")  # Of Files, below.
        self.assertEqual(page.left, [])

    def test_modelctl(self):
        page = Page("client/modelctl/README.md")
        block = page.one("sh", "modelctl publish")
        self.assertEqual(page.left, [])
        (self.work / "planner-v8").mkdir()
        models.write_gguf(self.work / "planner-v8/model.gguf", 8)
        self.serve("planner", 7)
        # It stands for a program of somebody else: reads the file that it is given.
        (self.work / "bin").mkdir()
        (self.work / "bin/llama-cli").write_text('#!/bin/sh\n[ "$1" = -m ] && head -c 4 "$2" && echo " read"\n')
        self.publish("planner", 6, folder=self.gguf_folder())
        for line in block.text.splitlines():
            if line.startswith("modelctl import"):
                if not self.checkpoint(self.work / "checkpoint.pt"):
                    continue
            elif line.startswith("modelctl exec"):
                self.ctl("swap", "planner", "--version", 6)
            verdict = (EXIT_OK, EXIT_DEGRADED, EXIT_OTHER) if "doctor" in line else (EXIT_OK,)
            out = self.shell(line, verdict, shell="bash", path=f"{self.work}/bin:")
            if line.startswith("modelctl exec"):
                self.assertIn("GGUF read", out)

    def gguf_folder(self):
        folder = self.folder / "gguf"
        folder.mkdir()
        models.write_gguf(folder / "model.gguf", 6)
        return folder

    def checkpoint(self, path):
        """A checkpoint of torch; where there is none, the lines about one are left out."""
        try:
            torch = case.need("torch")
        except unittest.SkipTest as why:
            print(f"(without checkpoints: {why})", end=" ")
            return False
        torch.save({"model": {"w": torch.ones(2, 32)}, "epoch": 3}, path)
        return True

    def test_formats(self):
        page = Page("docs/formats.md")
        imports = page.one("sh", "modelctl import").text.splitlines()
        self.assertEqual(len(imports), 3)
        case.write_tensors(self.work / "model.safetensors",
                           {"w": ("F32", [2, 32], case.pattern("BOOL", [256]))})
        have = {"checkpoint.pt": self.checkpoint(self.work / "checkpoint.pt"),
                "model.onnx": self.onnx(self.work / "model.onnx"), "model.safetensors": True}
        for line in imports:  # Each for itself: two of them write the same file.
            source = line.split()[2]
            target = self.work / re.search(r"--out (\S+)", line)[1]
            if have[source]:
                self.shell(line)
                self.assertTrue(target.exists(), line)
                target.unlink()
        (self.work / "planner.engine").write_bytes(test_bindings.plan(8))
        self.shell(page.one("sh", "--require").text)
        self.assertEqual(self.version_row("planner", 8)["requires"]["tensorrt"], "10.3.0")
        self.assertEqual(page.left, [])

    def onnx(self, path):
        try:
            onnx = case.need("onnx")
        except unittest.SkipTest as why:
            print(f"(without ONNX: {why})", end=" ")
            return False
        weight = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [2, 2], [1.0, 2.0, 3.0, 4.0])
        out = onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [2, 2])
        onnx.save(onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [out], [weight])), path)
        return True


class DesiredState(harness.Case):
    """docs/desired_state.md: files that the daemon follows, in every way that the page shows."""

    start_daemon = False

    def setUp(self):
        super().setUp()
        self.page = Page("docs/desired_state.md")
        self.place = self.folder / "etc"
        self.place.mkdir(mode=0o755)
        self.place.chmod(0o755)

    def follow(self, text):
        """A daemon with the page's configuration, on a file with that text."""
        (self.place / "models").write_text(text)
        (self.place / "models").chmod(0o644)
        config = self.page.take("toml")[0].text.replace("/etc/modelhost", str(self.place))
        self.daemon = self.new_daemon(config=config)

    def desired(self):
        return self.json("status")["desired"]

    def labels(self):
        wait_for("the file to be read", lambda: self.desired()["state"] == "ok")
        return {(row["model"], row["label"]): row["want"] for row in self.desired()["labels"]}

    def test_the_file_is_understood(self):
        self.follow(self.page.take("desired")[0].text)
        self.assertEqual(self.labels(), {("planner", "stable"): 8, ("planner", "canary"): 9,
                                         ("detector", "stable"): 3})

    def test_what_the_engines_write_is_understood(self):
        try:
            yaml = case.need("yaml")
        except unittest.SkipTest:
            self.skipTest("Debian's python3-yaml is not installed")
        kubernetes, ansible = (list(yaml.safe_load_all(block.text)) for block in self.page.take("yaml"))
        config, workload = kubernetes
        pod = workload["spec"]["template"]["spec"]
        (mount,), (volume,) = pod["containers"][0]["volumeMounts"], pod["volumes"]
        self.assertEqual((mount["name"], volume["configMap"]["name"]),
                         (volume["name"], config["metadata"]["name"]))
        text, = (block.text for block in self.page.take("toml")[1:])
        self.assertIn(f'"{mount["mountPath"]}/{next(iter(config["data"]))}"', text)
        self.follow(config["data"]["models"])
        self.assertEqual(self.labels(), {("planner", "stable"): 8, ("detector", "stable"): 3})
        content = ansible[0][0]["ansible.builtin.copy"]["content"]
        content = re.sub(r"\{\{ \w+ \}\}", "5", content)
        (self.place / "new").write_text(content)
        (self.place / "new").chmod(0o644)
        (self.place / "new").rename(self.place / "models")
        wait_for("the new file", lambda: set(self.labels().values()) == {5})

    def test_the_state_script_ends_when_the_machine_is_there(self):
        (script,) = self.page.take("sh")
        self.follow("")
        self.publish("planner", 8)
        (self.place / "work").mkdir()
        (self.place / "work/models").write_text("planner.stable = 8\n")
        done = subprocess.run(
            ["sh", "-eu", "-c", script.text.replace("/etc/modelhost", str(self.place))],
            cwd=self.place / "work", capture_output=True, text=True, check=False,
            timeout=5 * harness.DEADLINE_S,
            env=environment(MODELHOST_RUNTIME_DIR=str(self.daemon.runtime),
                            PATH=f"{harness.PROGRAMS.bin}:/usr/bin:/bin"))
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(self.desired()["labels"][0]["have"], 8)

    def test_every_block_is_taken_by_a_test(self):
        self.assertEqual([len(self.page.take(language)) for language in ("desired", "yaml", "toml", "sh")],
                         [1, 2, 2, 1])
        self.assertEqual(self.page.left, [])


class Files(unittest.TestCase):
    def setUp(self):
        import tempfile
        folder = tempfile.TemporaryDirectory(prefix="modelhost-test-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def check(self, text, where):
        config = self.folder / "modelhostd.toml"
        config.write_text(text)
        done = subprocess.run([harness.PROGRAMS.daemon, "--config", config, "--check-config"],
                              capture_output=True, text=True, check=False, env=environment())
        self.assertEqual(done.returncode, 0, f"{where}\n{text}\n{done.stderr}")

    def test_configurations_are_good_also_with_the_lines_that_are_comments(self):
        for name in ("docs/operations.md", "docs/device.md", "docs/desired_state.md"):
            for block in Page(name).take("toml"):
                self.check(block.text, block.where)
                for line in re.findall(r"(?m)^# (\w+ = .*)$", block.text):
                    key = line.split()[0]
                    self.check(re.sub(rf"(?m)^{key} = .*$", lambda _: line, block.text, count=1),
                               block.where)
        self.assertEqual(Page("docs/device.md").take("sh"), [])

    def test_the_drop_in_for_another_store_is_good(self):
        if not shutil.which("systemd-analyze"):
            self.skipTest("there is no systemd-analyze")
        drop_in = self.folder / "etc/systemd/system/modelhostd.service.d"
        for folder in (self.folder / "usr/sbin", self.folder / "bin", drop_in):
            folder.mkdir(parents=True)
        for name in ("usr/sbin/modelhostd", "bin/sh"):
            (self.folder / name).write_text("#!/bin/sh\n")
            (self.folder / name).chmod(0o755)
        for unit in ("modelhostd.service", "modelhostd-control.socket", "modelhostd-handles.socket"):
            shutil.copy(ROOT / "systemd" / unit, drop_in.parent)
        (block,) = Page("docs/operations.md").take("ini")
        (drop_in / "override.conf").write_text(block.text)
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", "--recursive-errors=no",
                               f"--root={self.folder}", "modelhostd.service"], capture_output=True,
                              text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        # Its options are the daemon's.
        started = re.findall(r"ExecStart=\S+ (.*)", block.text)[-1]
        usage = subprocess.run([harness.PROGRAMS.daemon, "--help"], capture_output=True, text=True,
                               check=True, env=environment()).stdout
        for option in re.findall(r"--[\w-]+", started):
            self.assertIn(option, usage)


if __name__ == "__main__":
    unittest.main()
