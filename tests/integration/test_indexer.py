"""Model files are parsed by modelhost-indexer: what becomes of a load when that goes wrong."""
import pathlib
import shutil
import subprocess
import unittest

import harness
from harness import EXIT_OTHER, Case, smoke, wait_for


class Indexer(Case):
    start_daemon = False

    def with_indexer(self, program, config=None):
        """A daemon beside which `program` (None: nothing) lies under the indexer's name."""
        folder = self.folder / "programs"
        folder.mkdir()
        folder.chmod(0o755)
        daemon = shutil.copy(harness.PROGRAMS.daemon, folder / "modelhostd")
        if program:
            shutil.copy(program, folder / "modelhost-indexer")
        self.daemon = self.new_daemon(program=daemon, config=config)
        return self.daemon

    def run_once(self, daemon):
        return subprocess.run(daemon.command(), capture_output=True, text=True, check=False,
                              timeout=harness.DEADLINE_S, cwd="/", env=harness.environment(),
                              **harness.as_user(harness.DAEMON))

    @smoke
    def test_the_built_program_is_found_and_used(self):
        self.daemon = self.new_daemon()
        self.serve("planner", 1)
        self.assertIn("event=parsing_isolated", self.daemon.log.read_text())

    def test_one_that_gives_no_answer_fails_loads_and_nothing_else(self):
        real = pathlib.Path(harness.PROGRAMS.bin) / "modelhost-indexer"
        self.with_indexer(real)
        program = self.folder / "programs" / "modelhost-indexer"
        # In place: the daemon has the file open.
        shutil.copyfile("/bin/false", program)
        self.publish("planner", 1)
        result = self.ctl("swap", "planner", "--version", 1, expect=EXIT_OTHER)
        self.assertIn("modelhost-indexer", result.err)
        self.assertIn("status 1", result.err)
        # Nothing is held against the files.
        self.assertEqual(self.version_row("planner", 1)["state"], "FAILED")
        shutil.copyfile(real, program)
        self.ctl("swap", "planner", "--version", 1)

    def test_one_that_cannot_be_confined_is_not_used_unless_that_is_accepted(self):
        self.with_indexer("/bin/false")  # It does not die of what is forbidden.
        self.serve("planner", 1)
        log = self.daemon.log.read_text()
        self.assertIn("event=parsing_in_process", log)
        self.assertIn("cannot be confined", log)
        self.daemon.stop()
        self.daemon.config_text = '[load]\nisolate_parsing = "required"\n'
        done = self.run_once(self.daemon)
        self.assertEqual(done.returncode, 1, done)
        self.assertIn("cannot be confined", done.stderr)

    def test_an_upgrade_under_a_running_daemon_changes_nothing(self):
        self.with_indexer(pathlib.Path(harness.PROGRAMS.bin) / "modelhost-indexer")
        program = self.folder / "programs" / "modelhost-indexer"
        program.unlink()
        shutil.copy("/bin/false", program)
        self.serve("planner", 1)

    def test_without_the_program_the_daemon_parses_and_says_so(self):
        self.with_indexer(None)
        self.serve("planner", 1)
        self.assertIn("event=parsing_in_process", self.daemon.log.read_text())

    def test_off_takes_it_for_not_there(self):
        self.with_indexer("/bin/false", config='[load]\nisolate_parsing = "off"\n')
        self.serve("planner", 1)

    def test_required_means_no_start_without_it(self):
        folder = self.folder / "programs"
        folder.mkdir()
        folder.chmod(0o755)
        daemon = harness.Daemon(self.folder, wait=False,
                                program=shutil.copy(harness.PROGRAMS.daemon, folder / "modelhostd"),
                                config='[load]\nisolate_parsing = "required"\n')
        done = self.run_once(daemon)
        self.assertEqual(done.returncode, 1, done)
        self.assertIn("modelhost-indexer", done.stderr)
        self.assertIn("isolate_parsing", done.stderr)

    def test_no_process_is_left_behind(self):
        self.daemon = self.new_daemon()
        self.serve("planner", 1)
        children = pathlib.Path(f"/proc/{self.daemon.process.pid}/task")
        wait_for("the children to be gone", lambda: not any(
            (task / "children").read_text().strip() for task in children.iterdir()))


if __name__ == "__main__":
    unittest.main()
