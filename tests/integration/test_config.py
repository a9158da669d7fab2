"""The configuration in force: shown with where each value comes from, and read again."""
import unittest

from harness import CLIENT, EXIT_INTEGRITY, EXIT_PERMISSION, Case, needs_root, smoke, wait_for


class Config(Case):
    daemon_options = {"config": "[load]\nthreads = 2\n", "metrics": "127.0.0.1:0"}

    def entries(self):
        shown = self.json("config", "show")
        self.assertEqual(shown["kind"], "Config")
        return {entry["key"]: entry for entry in shown["entries"]}

    def rewrite(self, text):
        self.daemon.config_text = text
        self.daemon.command()

    @smoke
    def test_show_says_where_a_value_comes_from(self):
        entries = self.entries()
        config = self.daemon.folder / "modelhostd.toml"
        self.assertEqual((entries["load.threads"]["value"], entries["load.threads"]["source"]),
                         ("2", f"{config}:2"))
        self.assertEqual((entries["load.verify"]["value"], entries["load.verify"]["source"]),
                         ('"full"', "default"))
        self.assertEqual((entries["store"]["value"], entries["store"]["source"]),
                         (f'"{self.daemon.store}"', "--store"))
        self.assertEqual((entries["metrics.listen"]["value"], entries["metrics.listen"]["source"]),
                         ('"127.0.0.1:0"', "--metrics"))
        text = self.ctl("config", "show").out
        self.assertRegex(text, r"KEY +VALUE +FROM")
        self.assertRegex(text, r"load\.threads +2 +\S+modelhostd\.toml:2")

    def test_reload_says_what_changed_and_what_needs_a_restart(self):
        self.rewrite('[load]\nthreads = 3\n[desired]\nfile = "/nonexistent/models"\n'
                     '[[models]]\nname = "planner"\nrequired = false\n')
        result = self.ctl("config", "reload")
        self.assertIn("load.threads  2 -> 3  needs a restart", result.out)
        self.assertIn('desired.file  "" -> "/nonexistent/models"\n', result.out)
        self.assertIn("1 change not in force before a restart", result.err)
        entries = self.entries()
        self.assertEqual(entries["load.threads"]["value"], "2")  # What is in force.
        self.assertEqual(entries["desired.file"]["value"], '"/nonexistent/models"')
        self.assertEqual(entries["models.planner.required"]["value"], "false")
        wait_for("missing", lambda: self.json("status")["desired"]["state"] == "missing")
        again = self.json("config", "reload")
        self.assertEqual([change["key"] for change in again["changes"]], ["load.threads"])
        self.assertTrue(again["changes"][0]["needsRestart"])

    def test_a_bad_file_changes_nothing_and_names_the_line(self):
        before = self.entries()
        self.rewrite('[desired]\nfile = "/x"\n[load]\nthread = 3\n')
        result = self.ctl("config", "reload", expect=EXIT_INTEGRITY)
        self.assertRegex(result.err, r"modelhostd\.toml:4: key 'load\.thread': unknown")
        self.assertEqual(self.entries(), before)
        self.rewrite("[load]\nthreads = 2\n")
        self.assertIn("nothing changed", self.ctl("config", "reload").out)

    def test_reload_by_signal_and_by_call_at_one_time(self):
        processes = [self.daemon.ctl_start("config", "reload") for _ in range(8)]
        self.daemon.reload()
        for process in processes:
            out, err = process.communicate()
            self.assertEqual(process.returncode, 0, err)
            self.assertIn("read again", out)

    @needs_root
    def test_only_operators_reload(self):
        self.ctl("config", "show", user=CLIENT)
        self.ctl("config", "reload", user=CLIENT, expect=EXIT_PERMISSION)


if __name__ == "__main__":
    unittest.main()
