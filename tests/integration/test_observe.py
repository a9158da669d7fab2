"""What Prometheus and a person with a log file see."""
import re
import socket
import unittest
import urllib.request

import models
from harness import Case, smoke, wait_for

NAMES = """
modelhost_build_info modelhost_ready modelhost_model_load_duration_seconds_bucket
modelhost_model_load_phase_duration_seconds_bucket modelhost_model_load_bytes_total
modelhost_model_version_state modelhost_label_version modelhost_label_generation
modelhost_swaps_total modelhost_swap_duration_seconds_bucket modelhost_swap_flip_duration_seconds_bucket
modelhost_leases modelhost_clients modelhost_attach_duration_seconds_bucket
modelhost_host_mapped_bytes modelhost_host_resident_bytes modelhost_host_locked_bytes
modelhost_memory_budget_bytes modelhost_memory_reserved_bytes modelhost_invalid_transitions_total
process_cpu_seconds_total process_resident_memory_bytes process_open_fds process_max_fds
process_start_time_seconds
""".split()

SAMPLE = re.compile(r'^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^}]*\})? ([^ ]+)$')


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Metrics(Case):
    def setUp(self):
        self.port = free_port()
        self.daemon_options = {"metrics": f"127.0.0.1:{self.port}"}
        super().setUp()

    def scrape(self):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            self.assertTrue(answer.headers["Content-Type"].startswith("text/plain"))
            text = answer.read().decode()
        samples = {}
        for line in text.splitlines():
            if not line or line.startswith("#"):
                continue
            match = SAMPLE.match(line)
            self.assertTrue(match, f"not a sample: {line}")
            samples.setdefault(match[1], {})[match[2] or ""] = float(match[3])
        return samples

    @smoke
    def test_names_and_values(self):
        self.serve("planner", 7)
        self.publish("planner", 8)
        self.ctl("swap", "planner", "--version", "8")
        client = self.client()
        client.ok("acquire", ref="planner")
        client.ok("seeds")
        wait_for("the lease to be counted",
                 lambda: sum(self.scrape().get("modelhost_leases", {}).values()) == 1)
        samples = self.scrape()
        self.assertEqual([name for name in NAMES if name not in samples], [])
        self.assertEqual(samples["modelhost_ready"], {"": 1.0})
        self.assertEqual(list(samples["modelhost_build_info"].values()), [1.0])
        self.assertEqual(samples["modelhost_invalid_transitions_total"], {"": 0.0})

        def value(name, *parts):
            found = [number for labels, number in samples[name].items()
                     if all(part in labels for part in parts)]
            self.assertEqual(len(found), 1, (name, parts, samples[name]))
            return found[0]

        self.assertEqual(value("modelhost_label_version", 'model="planner"', 'label="stable"'), 8)
        self.assertEqual(value("modelhost_model_version_state", 'version="8"', 'state="ready"'), 1)
        self.assertGreater(value("modelhost_host_resident_bytes", 'version="8"'), 0)
        self.assertEqual(value("modelhost_clients"), 1)
        loads = sum(samples["modelhost_model_load_duration_seconds_count"].values())
        self.assertEqual(loads, 2)
        for name, rows in samples.items():
            if name.endswith("_total") or name.endswith("_bucket"):
                for labels in rows:
                    self.assertNotIn("version=", labels if name != "modelhost_build_info" else "")

    def test_series_of_an_unloaded_version_go_away(self):
        self.publish("planner", 1)
        self.ctl("load", "planner@1")
        self.assertTrue(any('version="1"' in labels
                            for labels in self.scrape()["modelhost_host_mapped_bytes"]))
        self.ctl("unload", "planner@1")
        wait_for("the series to go", lambda: not any(
            'version="1"' in labels
            for labels in self.scrape().get("modelhost_host_mapped_bytes", {})))

    def test_failures_are_counted(self):
        source = self.folder / "bad"
        source.mkdir()
        (source / "model.safetensors").write_bytes(
            models.safetensors_header([("a", "F32", [1024], 4096)]) + b"\0" * 99)
        self.give(source)
        published = self.daemon.ctl("publish", source, "--model", "bad", "--version", "1")
        if published.code != 0:
            self.skipTest("a malformed file is refused at publish already")
        self.assertNotEqual(self.daemon.ctl("load", "bad@1").code, 0)
        rows = self.scrape()["modelhost_model_load_failures_total"]
        self.assertEqual(sum(rows.values()), 1)

    def test_a_port_in_use_is_an_error_that_names_it(self):
        import subprocess
        import harness
        other = self.folder / "other"
        other.mkdir()
        second = harness.Daemon(other, wait=False, metrics=f"127.0.0.1:{self.port}")
        done = subprocess.run(second.command(), capture_output=True, text=True, timeout=30,
                              env=harness.environment(), check=False,
                              **harness.as_user(harness.DAEMON))
        self.assertNotEqual(done.returncode, 0)
        self.assertIn(str(self.port), done.stderr)


class Log(Case):
    def test_one_line_per_event_with_keys_and_values(self):
        self.serve("planner", 7)
        text = self.daemon.log.read_text()
        self.assertTrue([line for line in text.splitlines() if "model=planner" in line and
                         "version=7" in line], text)


if __name__ == "__main__":
    unittest.main()
