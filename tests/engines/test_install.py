"""What happens where the engines cannot be had: the tests say so and are skipped, but a lock file that does
not hold is a failure."""
import os
import pathlib
import socket
import sys
import tempfile
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import engine_case  # noqa: E402
import install  # noqa: E402


def installed():
    """Whether npm is there; the cases that run it need it."""
    try:
        install.program("npm")
        install.node_version()
    except install.Unavailable as reason:
        raise unittest.SkipTest(str(reason)) from None


class Install(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="modelhost-install-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.cache = self.folder / "cache"
        for change in (mock.patch.object(install, "CACHE", self.cache),
                       mock.patch.dict(os.environ, {"npm_config_cache": str(self.folder / "npm")})):
            change.start()
            self.addCleanup(change.stop)

    def lock(self, text):
        """Another package.json and lock file than ours, of one package."""
        (self.folder / "package.json").write_text('{"name": "t", "dependencies": {"onnxruntime-common": "1.24.3"}}')
        (self.folder / "package-lock.json").write_text(text)
        change = mock.patch.object(install, "HERE", self.folder)
        change.start()
        self.addCleanup(change.stop)

    def closed_registry(self):
        with socket.socket() as listener:  # Nobody listens there afterwards.
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        change = mock.patch.dict(os.environ, {"npm_config_registry": f"http://127.0.0.1:{port}/"})
        change.start()
        self.addCleanup(change.stop)

    def refused(self, reason):
        with self.assertRaisesRegex(install.Unavailable, reason):
            install.node_modules()
        self.assertEqual([path for path in self.cache.glob("*") if path.is_dir()], [], "nothing half made is left")

    def test_what_may_not_be_installed_is_not(self):
        installed()
        with mock.patch.dict(os.environ, {"MODELHOST_NO_INSTALL": "1"}):
            self.refused("MODELHOST_NO_INSTALL is set")

    def test_without_node_the_tests_are_skipped_and_say_so(self):
        with mock.patch.dict(os.environ, {"PATH": str(self.folder)}):
            self.refused("there is no node in PATH")
            with self.assertRaisesRegex(unittest.SkipTest, "there is no node in PATH"):
                engine_case.Engines().node()

    def test_without_a_registry_too(self):
        installed()
        self.closed_registry()
        self.lock(LOCK.replace("HASH", "A" * 86 + "=="))
        self.refused("npm cannot have the packages: .*ECONNREFUSED")

    def test_a_lock_file_that_cannot_be_read_is_a_failure(self):
        installed()
        self.closed_registry()
        self.lock(LOCK[:-3])
        with self.assertRaisesRegex(RuntimeError, "npm ci failed"):
            install.node_modules()

    def test_every_package_of_the_lock_file_has_its_hash_and_no_address(self):
        import json
        packages = json.loads((install.HERE / "package-lock.json").read_text())["packages"]
        self.assertGreater(len(packages), 100)
        for name, entry in packages.items():
            if name:
                self.assertRegex(entry["integrity"], "^sha512-", name)
                self.assertNotIn("resolved", entry, name)


LOCK = """{"name": "t", "lockfileVersion": 3, "requires": true, "packages": {
  "": {"name": "t", "dependencies": {"onnxruntime-common": "1.24.3"}},
  "node_modules/onnxruntime-common": {"version": "1.24.3", "integrity": "sha512-HASH"}}}"""
