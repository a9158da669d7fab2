"""The harness itself: what must not happen to a daemon is reported when it does."""
import os
import signal
import unittest

import harness
from harness import Case


class Reports(Case):
    """Each case makes a daemon that misbehaves and hands it to the clean-up by hand."""

    start_daemon = False

    def daemon_of_ours(self):
        daemon = harness.Daemon(self.folder, wait=False)
        self.addCleanup(lambda: daemon.alive and daemon.kill())
        return daemon.start()

    def test_an_end_by_itself_is_reported(self):
        daemon = self.daemon_of_ours()
        os.kill(daemon.process.pid, signal.SIGABRT)
        daemon.process.wait()
        with self.assertRaisesRegex(AssertionError, "ended by itself with -6"):
            self._finish(daemon)

    def test_a_kill_and_a_stop_of_the_test_are_not(self):
        daemon = self.daemon_of_ours()
        daemon.kill()
        self._finish(daemon)
        daemon.start()
        self.assertEqual(daemon.stop(), 0)
        self._finish(daemon)

    def test_a_bad_exit_status_is_reported(self):
        daemon = self.daemon_of_ours()
        daemon.stop()
        daemon.exit_code = 3
        with self.assertRaisesRegex(AssertionError, "ended with 3 on SIGTERM"):
            self._finish(daemon)

    def test_what_the_log_may_not_have_is_reported(self):
        for line in ("level=error event=invalid_transition model=planner version=1 from=READY",
                     "x.cc:3:5: runtime error: signed integer overflow"):
            daemon = self.daemon_of_ours()
            daemon.stop()
            with open(daemon.log, "a", encoding="utf-8") as log:
                log.write(line + "\n")
            with self.assertRaisesRegex(AssertionError, "the daemon's log has"):
                self._finish(daemon)
            daemon.log.unlink()


if __name__ == "__main__":
    unittest.main()
