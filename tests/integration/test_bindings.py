"""What a version needs: the machine that an engine was built for, and the files of a whole version."""
import json
import os
import platform
import shutil
import struct
import subprocess

import harness
import models
from harness import (AS_ROOT, DAEMON, EXIT_CONFLICT, EXIT_INTEGRITY, EXIT_OLD_SERVES,
                     EXIT_USAGE, Case, smoke, wait_for)

HERE_PLATFORM = f"linux-{platform.machine()}"
MACHINE = f"""[machine]
platform = "linux-aarch64"
tensorrt = "10.3.0"
compute_capability = ["8.7"]
cuda_driver = "12.6"
"""
JETSON = {"platform": "linux-aarch64", "tensorrt": "10.3.0", "compute_capability": "8.7"}


def plan(seed, size=96 << 10):
    """A TensorRT plan of the generation that is known best."""
    payload = models.fill(seed, size)
    return b"ptrt" + struct.pack("<IIQI", 0x61, 239, len(payload), 7) + payload


def write_engine(folder, seed, name="model.engine", requires=None):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(plan(seed))
    if requires is not None:
        (folder / f"{name}.requires.json").write_text(json.dumps(requires))
    return folder


class Bound(Case):
    def engine(self, version, requires=None, sidecar=None, expect=0):
        folder = write_engine(self.folder / f"engine-{version}", version, requires=sidecar)
        self.give(folder)
        flags = [f"--require={key}={value}" for key, value in (requires or {}).items()]
        return self.ctl("publish", folder, "--model", "planner", "--version", version, *flags,
                        expect=expect)

    def served(self):
        client = self.client()
        client.ok("acquire", ref="planner")
        return client.ok("file", path="model.engine")

    def reason(self, version):
        row = self.version_row("planner", version)
        return row["state"], row["reason"]


class Engines(Bound):
    daemon_options = {"config": MACHINE}

    @smoke
    def test_an_engine_for_this_machine_is_served_as_the_file_that_it_is(self):
        self.engine(1, JETSON)
        self.ctl("swap", "planner", "--version", "1")
        row = self.version_row("planner", 1)
        self.assertEqual((row["state"], row["format"], row["tensorCount"], row["requires"]),
                         ("READY", "tensorrt", 0, JETSON))
        answer = self.served()
        self.assertEqual(answer["sha256"], models.sha256(self.folder / "engine-1/model.engine"))
        self.assertTrue(answer["same_by_path"])
        self.assertEqual(self.json("describe", "planner@1")["version"]["lastLoad"]["warnings"], [])
        index = self.json("inspect", "planner@1")
        self.assertEqual((index["format"], index["requires"]), ("tensorrt", JETSON))
        self.assertIn('"239"', json.dumps(index["components"]))
        self.assertIn("tensorrt=10.3.0", self.ctl("describe", "planner@1").out)
        self.assertIn("tensorrt=10.3.0", self.ctl("-o", "wide", "versions", "planner").out)

    @smoke
    def test_an_engine_for_another_machine_is_refused_and_the_old_one_serves(self):
        self.engine(1, JETSON)
        self.ctl("swap", "planner", "--version", "1")
        for version, key, theirs, ours in [(2, "platform", "linux-x86_64", "linux-aarch64"),
                                           (3, "tensorrt", "10.3.1", "10.3.0"),
                                           (4, "compute_capability", "8.9", "8.7"),
                                           (5, "cuda_driver", "13.0", "12.6")]:
            with self.subTest(key):
                self.engine(version, {**JETSON, key: theirs})
                result = self.ctl("swap", "planner", "--version", version, expect=EXIT_OLD_SERVES)
                for text in (f"planner@{version}", key, theirs, ours, "machine."):
                    self.assertIn(text, result.err)
                self.ctl("load", f"planner@{version}", expect=EXIT_CONFLICT)
                state, why = self.reason(version)
                self.assertEqual(state, "FAILED")
                self.assertIn(f"{key} must be {theirs}", why)
                self.assertEqual(self.served()["sha256"],
                                 models.sha256(self.folder / "engine-1/model.engine"))
        self.engine(6, {**JETSON, "tensorrt": "10.0+", "compute_capability": "8.0+"})
        self.ctl("swap", "planner", "--version", "6")

    def test_a_sidecar_binds_and_may_not_contradict(self):
        self.engine(1, sidecar={"platform": "linux-x86_64", "note": "kept"})
        result = self.ctl("load", "planner@1", expect=EXIT_CONFLICT)
        self.assertIn("linux-x86_64 (model.engine.requires.json)", result.err)
        self.assertIn("linux-aarch64", result.err)
        result = self.engine(2, {"tensorrt": "10.3.0"}, {"tensorrt": "8.6.1"}, expect=EXIT_CONFLICT)
        self.assertIn("8.6.1", result.err)
        result = self.engine(2, sidecar={"tensorrt": 10}, expect=EXIT_INTEGRITY)
        self.assertIn("model.engine.requires.json", result.err)
        self.engine(3, sidecar=JETSON)
        self.ctl("load", "planner@3")
        self.assertEqual(self.version_row("planner", 3)["requires"],
                         {f"model.engine: {key}": value for key, value in JETSON.items()})

    def test_what_it_requires_cannot_change_under_its_number(self):
        self.engine(1, JETSON)
        self.engine(1, JETSON)  # The same again is the same.
        result = self.engine(1, {**JETSON, "tensorrt": "8.6.1"}, expect=EXIT_CONFLICT)
        self.assertIn("10.3.0", result.err)
        self.assertIn("8.6.1", result.err)
        result = self.ctl("publish", self.folder / "engine-1", "--model", "planner", "--version", "1",
                          "--require", "tensorrt=8.6.1", "--stream", expect=EXIT_CONFLICT)
        self.assertIn("8.6.1", result.err)
        self.assertEqual(self.version_row("planner", 1)["requires"], JETSON)
        self.ctl("publish", self.folder / "engine-1", "--model", "planner", "--version", "2",
                 "--require", "tensorrt=ten", expect=EXIT_USAGE)

    def test_without_a_binding_it_is_served_with_a_warning(self):
        self.assertIn("warning: model.engine: nothing says", self.engine(1).err)
        self.ctl("swap", "planner", "--version", "1")
        warnings = self.json("describe", "planner@1")["version"]["lastLoad"]["warnings"]
        self.assertIn("nothing was compared", " ".join(warnings))
        wait_for("the log to say it", lambda: "nothing was compared" in self.daemon.log.read_text())

    def test_other_requirements_are_kept_and_warned_of(self):
        result = self.engine(1, {**JETSON, "made_by": "the lab"})
        self.assertIn("'made_by'", result.err)
        self.ctl("load", "planner@1")
        self.assertEqual(self.version_row("planner", 1)["requires"]["made_by"], "the lab")
        warnings = self.json("describe", "planner@1")["version"]["lastLoad"]["warnings"]
        self.assertIn("'made_by'", " ".join(warnings))

    def test_a_reload_takes_another_machine(self):
        self.engine(1, {**JETSON, "tensorrt": "8.6.1"})
        self.ctl("load", "planner@1", expect=EXIT_CONFLICT)
        self.daemon.config_text = MACHINE.replace("10.3.0", "8.6.1")
        self.daemon.command()  # Writes the file.
        self.daemon.reload()
        self.ctl("load", "planner@1")

    def configure(self, text):
        self.daemon.config_text = text
        self.daemon.command()  # Writes the file.
        self.daemon.reload()

    def test_a_reload_that_takes_the_machine_away_stops_grants_and_labels(self):
        self.engine(1, JETSON)
        self.ctl("swap", "planner", "--version", "1")
        client = self.client()
        client.ok("acquire", ref="planner")
        self.configure(MACHINE.replace("10.3.0", "8.6.1"))
        wait_for("the reason", lambda: "8.6.1" in self.reason(1)[1])
        self.assertEqual(self.reason(1)[0], "READY")
        for command in [("load", "planner@1"), ("label", "set", "planner:canary", "1"),
                        ("swap", "planner", "--version", "1", "--label", "other")]:
            result = self.daemon.ctl(*command)
            self.assertIn(result.code, (EXIT_CONFLICT, EXIT_OLD_SERVES), str(result))
            self.assertIn("tensorrt must be 10.3.0", result.err)
            self.assertIn("8.6.1", result.err)
        result = self.daemon.ctl("exec", "planner", "--", "/bin/true")
        self.assertNotEqual(result.code, 0, str(result))
        self.assertIn("8.6.1", result.err)
        # Who holds it keeps it.
        self.assertEqual(client.ok("file", path="model.engine")["sha256"],
                         models.sha256(self.folder / "engine-1/model.engine"))
        self.configure(MACHINE)
        wait_for("no reason", lambda: not self.reason(1)[1])
        self.ctl("label", "set", "planner:canary", "1")
        self.assertEqual(self.served()["sha256"],
                         models.sha256(self.folder / "engine-1/model.engine"))

    def test_a_label_on_it_does_not_make_it_ready_at_a_start(self):
        self.engine(1, JETSON)
        self.ctl("swap", "planner", "--version", "1")
        self.daemon.stop()
        self.daemon.config_text = MACHINE.replace("8.7", "8.9")
        self.daemon.start()
        wait_for("the load to fail", lambda: self.reason(1)[0] == "FAILED")
        self.assertIn("8.9", self.reason(1)[1])
        # The way out that the error names.
        self.assertIn("set machine.compute_capability in modelhostd.toml and reload",
                      self.reason(1)[1])
        self.configure(MACHINE)
        wait_for("it to be served", lambda: self.reason(1)[0] == "READY")
        self.served()

    def test_a_file_that_is_no_plan_is_quarantined(self):
        folder = write_engine(self.folder / "cut", 1)
        data = (folder / "model.engine").read_bytes()
        (folder / "model.engine").write_bytes(data[:-8])
        self.give(folder)
        result = self.ctl("publish", folder, "--model", "planner", "--version", "1")
        self.assertIn("payload", result.err)
        self.ctl("load", "planner@1", expect=EXIT_INTEGRITY)
        self.assertEqual(self.reason(1)[0], "QUARANTINED")


class Probed(Bound):
    """The machine's side is looked for: a driver and a library in a folder of the linker's."""

    start_daemon = False

    def boot(self, **settings):
        libraries = self.folder / "lib"
        libraries.mkdir(mode=0o755)
        fake = harness.PROGRAMS.build / "tests" / "fake_cuda" / "libcuda.so.1"
        if fake.exists():
            shutil.copy(fake, libraries / "libcuda.so.1")
        else:
            self.fail(f"{fake}: not built (target fake_cuda_driver)")
        (libraries / "libnvinfer.so.10.3.0").write_bytes(b"")
        (libraries / "libnvinfer.so.10").symlink_to("libnvinfer.so.10.3.0")
        path = f"{libraries}:{harness.PROGRAMS.lib}"
        self.daemon = self.new_daemon(env={"LD_LIBRARY_PATH": path, "FAKE_CUDA_GPUS": "8.7,8.9",
                                           "FAKE_CUDA_DRIVER": "12060", **settings})

    def test_what_is_found_decides(self):
        self.boot()
        here = {"platform": HERE_PLATFORM, "tensorrt": "10.3.0", "compute_capability": "8.9",
                "cuda_driver": "12.4"}
        self.engine(1, here)
        self.ctl("swap", "planner", "--version", "1")
        self.assertEqual(self.served()["sha256"],
                         models.sha256(self.folder / "engine-1/model.engine"))
        self.engine(2, {**here, "compute_capability": "9.0"})
        result = self.ctl("swap", "planner", "--version", "2", expect=EXIT_OLD_SERVES)
        self.assertIn("8.7, 8.9 (libcuda.so.1)", result.err)
        self.engine(3, {**here, "tensorrt": "8.6.1"})
        result = self.ctl("load", "planner@3", expect=EXIT_CONFLICT)
        self.assertIn("libnvinfer.so.10.3.0", result.err)

    def test_a_driver_that_crashes_costs_the_gpu_only(self):
        self.boot(FAKE_CUDA_FAULT="crash")
        self.engine(1, {"tensorrt": "10.3.0"})
        self.ctl("load", "planner@1")
        self.engine(2, {"compute_capability": "8.7"})
        result = self.ctl("load", "planner@2", expect=EXIT_CONFLICT)
        self.assertIn("ended by signal 6", result.err)
        self.assertIn("machine.compute_capability", result.err)
        self.assertTrue(self.daemon.alive)

    def test_unloading_ends_a_load_that_waits_for_a_driver(self):
        self.boot(FAKE_CUDA_FAULT="hang")
        self.engine(1, {"compute_capability": "8.7"})
        load = self.daemon.ctl_start("load", "planner@1")
        wait_for("the load", lambda: self.reason(1)[0] in ("RESERVED", "LOADING"))
        self.ctl("unload", "planner@1")
        load.communicate(timeout=harness.DEADLINE_S)
        self.assertNotEqual(load.returncode, 0)
        self.assertEqual(self.reason(1)[0], "STAGED")

    def test_the_probe_is_a_program_of_its_own(self):
        self.boot()
        done = subprocess.run([harness.PROGRAMS.daemon, "probe-machine"], capture_output=True,
                              text=True, check=True, timeout=60,
                              env=harness.environment(**self.daemon.env))
        self.assertIn("tensorrt=10.3.0\n", done.stdout)
        self.assertIn("compute_capability=8.7\ncompute_capability=8.9\n", done.stdout)
        self.assertIn("cuda_driver=12.6\n", done.stdout)
        self.assertIn(f"platform={HERE_PLATFORM}\n", done.stdout)


class Whole(Case):
    """requires_files, and that a version is what was published and nothing else."""

    daemon_options = {"config": '[[models]]\nname = "planner"\nrequires_files = ["extra.json"]\n'}

    def publish_with(self, version, extra=True, expect=0, more=()):
        folder = models.simple_model(self.folder / f"whole-{version}-{extra}", version)
        if extra:
            (folder / "extra.json").write_text(f'{{"of": {version}}}')
        self.give(folder)
        return self.ctl("publish", folder, "--model", "planner", "--version", version, *more,
                        expect=expect)

    def stored(self, version, name=""):
        return self.daemon.store / "models" / "planner" / "versions" / str(version) / name

    @smoke
    def test_a_version_without_a_required_file_is_never_ready(self):
        self.publish_with(1, more=["--label", "stable"])
        result = self.publish_with(2, extra=False, more=["--label", "stable"], expect=EXIT_OLD_SERVES)
        for text in ("warning: extra.json is not there", "extra.json", "requires_files",
                     "under a new number"):
            self.assertIn(text, result.err)
        self.ctl("load", "planner@2", expect=EXIT_CONFLICT)
        self.ctl("label", "set", "planner:canary", "2", expect=EXIT_CONFLICT)
        row = self.version_row("planner", 2)
        self.assertEqual(row["state"], "FAILED")
        self.assertIn("extra.json", row["reason"])
        self.assertIn("extra.json", self.ctl("versions", "planner").out)
        self.ctl("rescan")
        self.assertEqual(self.version_row("planner", 2)["state"], "FAILED")
        self.assertEqual(self.version_row("planner", 1)["labels"], ["stable"])
        # The way out that the error names.
        self.publish_with(3, more=["--label", "stable"])
        self.assertEqual(self.version_row("planner", 3)["state"], "READY")

    def test_a_dry_run_says_what_is_missing(self):
        result = self.publish_with(1, extra=False, more=["--dry-run"])
        self.assertIn("warning: extra.json is not there", result.err)

    def test_a_start_does_not_make_it_ready_either(self):
        self.daemon.config_text = ""
        self.daemon.command()
        self.daemon.reload()
        self.publish_with(1, extra=False, more=["--label", "stable"])
        self.daemon.stop()
        self.daemon.config_text = self.daemon_options["config"]
        self.daemon.start()
        wait_for("the load to fail", lambda: self.version_row("planner", 1)["state"] == "FAILED")
        self.ctl("health", "planner", expect=1)

    def test_a_file_added_by_hand_makes_no_version_whole(self):
        self.publish_with(1, extra=False)
        self.put(1, "extra.json", b"{}")
        result = self.daemon.ctl("load", "planner@1")
        self.assertNotEqual(result.code, 0)
        self.ctl("rescan")
        row = self.version_row("planner", 1)
        self.assertEqual(row["state"], "INVALID")
        self.assertIn("extra.json", row["reason"])

    def put(self, version, name, data):
        self.stored(version).chmod(0o755)
        self.stored(version, name).unlink(missing_ok=True)
        if data is not None:
            self.stored(version, name).write_bytes(data)
            self.stored(version, name).chmod(0o444)
            if AS_ROOT:
                os.chown(self.stored(version, name), DAEMON, DAEMON)
        self.stored(version).chmod(0o555)

    def test_what_was_published_is_never_mixed_with_what_came_later(self):
        for version, name, data, state in [
                (1, "tokenizer.json", None, "INVALID"),
                (2, "config.json", "same size", "QUARANTINED"),
                (3, "new.json", b"{}", "INVALID"),
                (4, "tokenizer.json", b"longer than it was before", "INVALID")]:
            with self.subTest(name, version=version):
                self.publish_with(version)
                if data == "same size":
                    data = b"#" * self.stored(version, name).stat().st_size
                self.put(version, name, data)
                self.ctl("rescan")
                result = self.daemon.ctl("load", f"planner@{version}")
                self.assertNotEqual(result.code, 0, str(result))
                self.assertEqual(self.version_row("planner", version)["state"], state)
                self.assertIn(name, self.version_row("planner", version)["reason"])

    def test_what_serves_is_not_mixed_either(self):
        self.publish_with(1, more=["--label", "stable"])
        client = self.client()
        client.ok("acquire", ref="planner")
        before = client.ok("file", path="config.json")["text"]
        data = b"#" * self.stored(1, "config.json").stat().st_size
        # Another file under the name: what is resident is the one that was published.
        self.put(1, "config.json", data)
        for each in (client, self.client()):
            each.ok("acquire", ref="planner", key="again")
            self.assertEqual(each.ok("file", path="config.json", key="again")["text"], before)
            self.assertEqual(each.ok("seeds", key="again")["seeds"], [1])
        # The very file, changed in place: seen, and not loaded again.
        self.stored(1, "tokenizer.json").chmod(0o644)
        with open(self.stored(1, "tokenizer.json"), "r+b") as file:
            file.write(b"#")
        wait_for("the change to be seen",
                 lambda: self.version_row("planner", 1)["health"] == "SUSPECT")
        self.ctl("load", "planner@1", expect=EXIT_INTEGRITY)

    def test_two_publishes_of_one_number_do_not_mix(self):
        folders = []
        for seed in (1, 2):
            folder = models.simple_model(self.folder / f"race-{seed}", seed, tensors=4,
                                         tensor_bytes=4 << 20)
            (folder / "extra.json").write_text(f'{{"of": {seed}}}')
            folders.append(self.give(folder))
        both = [self.daemon.ctl_start("publish", folder, "--model", "planner", "--version", "1")
                for folder in folders]
        codes = []
        for process in both:
            process.communicate(timeout=2 * harness.DEADLINE_S)
            codes.append(process.returncode)
        self.assertEqual(sorted(codes), [0, EXIT_CONFLICT])
        won = 1 + codes.index(0)
        self.ctl("swap", "planner", "--version", "1")
        client = self.client()
        client.ok("acquire", ref="planner")
        self.assertEqual(client.ok("seeds")["seeds"], [won])
        self.assertEqual(client.ok("file", path="extra.json")["text"], f'{{"of": {won}}}')

    def test_wrong_checksums_are_refused_in_a_version_placed_by_hand(self):
        folder = models.simple_model(self.folder / "by-hand", 7)
        (folder / "extra.json").write_text("{}")
        models.write_checksums(folder)
        (folder / "config.json").write_text("{}  ")
        self.publish_with(1)  # Makes the model's folder.
        target = self.stored(7)
        shutil.copytree(folder, target.parent / "7")
        for path in [target, *target.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o444)
            if AS_ROOT:
                os.chown(path, DAEMON, DAEMON)
        self.ctl("rescan")
        result = self.ctl("load", "planner@7", expect=EXIT_INTEGRITY)
        self.assertIn("config.json", result.err)
        self.assertEqual(self.version_row("planner", 7)["state"], "QUARANTINED")


if __name__ == "__main__":
    import unittest
    unittest.main()
