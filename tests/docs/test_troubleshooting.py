"""docs/troubleshooting.md: what programs really say is found there. (That every advice of doctor is there, also
those that no test can bring about, is held by doctor_test.)"""
import re
import shutil
import subprocess
import sys
import unittest

import newcomer  # noqa: F401  (the folders of harness and case)
import case
import harness
from harness import CLIENT, EXIT_DEGRADED, EXIT_OK, EXIT_OTHER, as_user, environment

PAGE = harness.ROOT / "docs/troubleshooting.md"


def words(text):
    return re.sub(r"\s+", " ", text)


class Troubleshooting(case.Case):
    def setUp(self):
        super().setUp()
        self.page = words(PAGE.read_text())

    def says(self, phrase, message):
        """A real message has these words, and the page has them in the head of an entry."""
        self.assertIn(phrase, words(message))
        heads = re.findall(r"\*\*(.+?)\*\*", self.page)
        self.assertTrue(any(phrase in head for head in heads), f"no entry has {phrase!r}")

    def doctor(self, runtime, *before):
        """The checks that are not well, of a doctor with other limits, perhaps."""
        done = subprocess.run(
            ["bash", "-c", "; ".join([*before, 'exec "$@"']), "bash", harness.PROGRAMS.ctl, "--runtime-dir",
             str(runtime), "-o", "json", "doctor"], capture_output=True, text=True, check=False, cwd="/",
            env=environment(HOME=str(self.folder)), **as_user(CLIENT))
        self.assertIn(done.returncode, (EXIT_OK, EXIT_OTHER, EXIT_DEGRADED), done.stderr)
        answer = harness.json.loads(done.stdout)
        return {check["name"]: check for check in answer["checks"] if check["verdict"] != "ok"}

    def test_what_doctor_really_finds_is_on_the_page(self):
        found = self.doctor(self.folder / "nowhere", "ulimit -n 256", "ulimit -l 64")
        for name in ("control.sock", "handles.sock", "memlock", "descriptors"):
            self.assertIn(name, found)
        self.daemon.handles_socket.unlink()
        with_daemon = self.doctor(self.daemon.runtime)
        self.assertIn("clients cannot attach", with_daemon["handles.sock"]["advice"])
        self.assertNotIn("control.sock", with_daemon)
        for check in [*found.values(), *with_daemon.values()]:
            with self.subTest(check["name"]):
                self.assertIn(f"| `{check['name']}` | {check['advice']} |", self.page)

    def test_what_python_says_is_on_the_page(self):
        self.serve("planner", 1)
        self.serve_tensors("net", 1, {"w": ("BF16", [4], case.pattern("BF16", [4]))})
        client = self.connect()
        handle = client.acquire("planner")
        with self.assertRaises(self.modelhost.NotFound) as raised:
            handle["layer.0.wieght"]
        self.says("did you mean", str(raised.exception))
        import pickle
        for made in (handle, client, handle["layer.0.weight"]):
            with self.assertRaises(TypeError) as raised:
                pickle.dumps(made)
            self.says("cannot pickle", str(raised.exception))
        case.need("numpy")
        with self.assertRaises(TypeError) as raised:
            client.acquire("net")["w"].numpy()
        self.says("numpy has no type for", str(raised.exception))
        with self.assertRaises(ValueError) as raised:
            handle["layer.0.weight"].numpy()[0] = 1
        self.assertIn(str(raised.exception), self.page)
        out = self.script("""
            import os
            client = modelhost.connect(runtime)
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                try:
                    client.acquire("planner")
                except modelhost.FailedPrecondition as error:
                    print(error, flush=True)
                os._exit(0)
            os.waitpid(child, 0)
        """)
        self.says("the session stays with the parent after fork (connect again in the child)", out)

    def import_error(self, folder, code="import modelhost", **env):
        done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True,
                              check=False, cwd="/", env={"PATH": "/usr/bin:/bin",
                                                         "PYTHONPATH": str(folder), **env})
        self.assertNotEqual(done.returncode, 0)
        return done.stderr.strip().splitlines()[-1]

    def test_what_an_import_says_is_on_the_page(self):
        away = self.folder / "of/no/prefix"
        shutil.copytree(harness.PROGRAMS.python / "modelhost", away / "modelhost")
        self.says("No module named 'modelhost'", self.import_error(self.folder))
        lost = self.import_error(away)
        # Where this machine has another library installed, that one is found, and may lack something.
        self.says("undefined symbol: mh_" if "undefined" in lost else
                  "libmodelhost.so.1: cannot open shared object file", lost)
        self.says("No module named 'modelhost.v1'", self.import_error(
            away, "import modelhost.v1", LD_LIBRARY_PATH=str(harness.PROGRAMS.lib)))
        (extension,) = (away / "modelhost").glob("_native*.so")
        extension.rename(extension.with_name("_native.cpython-27.so"))
        error = self.import_error(away, LD_LIBRARY_PATH=str(harness.PROGRAMS.lib))
        self.says("modelhost._native: there is none for this Python", error)
        self.assertIn("_native.cpython-27.so", error)

    def test_what_modelctl_and_the_daemon_say_is_on_the_page(self):
        self.says("nobody listens", self.stale_socket())
        self.says("may not command", self.ctl("swap", "planner", "--version", 1, user=CLIENT,
                                              expect=harness.EXIT_PERMISSION).err
                  if harness.AS_ROOT else "this user may not command")
        with newcomer.metrics_port_taken():
            home = self.folder / "h"
            home.mkdir()
            self.give(home, harness.DAEMON)
            daemon = subprocess.Popen(
                [harness.PROGRAMS.daemon, "--store", home / "s", "--state", home / "t", "--runtime-dir",
                 home / "r"], stderr=subprocess.PIPE, text=True, env=environment(HOME=str(home)), cwd="/",
                preexec_fn=harness.end_with_us, **as_user(harness.DAEMON))
            try:
                for line in daemon.stderr:
                    if "metrics_off" in line:
                        break
                self.says("event=metrics_off", line)
            finally:
                daemon.terminate()
                daemon.communicate()

    def stale_socket(self):
        """What a killed daemon leaves."""
        other = self.new_daemon("killed")
        other.kill()
        return other.ctl("status").err

    def test_links_of_the_guides_lead_somewhere(self):
        for page in (*harness.ROOT.glob("docs/*.md"), harness.ROOT / "README.md",
                     *harness.ROOT.glob("client/**/README.md")):
            for target in re.findall(r"\]\(([\w./-]+)\)", page.read_text()):
                self.assertTrue((page.parent / target).exists(), f"{page}: {target}")


if __name__ == "__main__":
    unittest.main()
