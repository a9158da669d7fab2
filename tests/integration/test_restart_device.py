"""A restart that uploads nothing: copies on a GPU (of the fake driver) in systemd's fd store."""
import json
import os

import fdstore
from device_case import device_memory, fake
from harness import wait_for
from test_restart import CONFIG, Restart

PARKED_ON_A_GPU = 5  # Weights, two sidecars, the index, one segment.


class OnAGpu(Restart):
    def kept_daemon(self, **options):
        folder = self.folder / "d"
        folder.mkdir()
        folder.chmod(0o755)
        self.machine = f"restart-{os.getpid()}-{self.id().rsplit('.', 1)[-1][:40]}"
        daemon = fdstore.KeptDaemon(
            folder, config=CONFIG.format(residency=self.residency) + 'device = "all"\n',
            env=fake(FAKECUDA_MACHINE=self.machine), **options)
        self.addCleanup(daemon.close)
        self.addCleanup(self._finish, daemon)
        daemon.start(wait_ready=False)
        wait_for("the daemon to answer", lambda: daemon.ctl("status").code == 0)
        return daemon

    def phases(self):
        return [phase["name"] for phase in self.last_load()["phases"]]

    def check_one_copy(self):
        version = self.json("describe", "planner")["version"]
        copy, = version["devices"]
        self.assertEqual((copy["mode"], copy["segments"], copy["lost"]), ("vmm_fd", 1, False))
        self.assertEqual(version["deviceState"], "RESIDENT")
        gpu, = self.json("status")["device"]["devices"]
        self.assertEqual((gpu["reservedBytes"], gpu["copiedBytes"]), (copy["bytes"],) * 2)
        wait_for("one segment on the GPU", lambda: len(device_memory(self.machine)) == 1)
        wait_for("all to be in the store",
                 lambda: len(self.daemon.keeper.names()) == PARKED_ON_A_GPU)

    def test_the_copy_is_verified_and_not_uploaded(self):
        self.serve_weights(1)
        self.check_one_copy()
        self.assertIn("device_upload", self.phases())
        for how in ("kill", "stop", "kill"):
            with self.subTest(how):
                self.restart(how)
                self.assertEqual(self.last_load()["source"], "restore")
                self.assertEqual(self.restart_status()["problem"], "")
                self.assertIn("device_verify", self.phases())
                self.assertNotIn("device_upload", self.phases())
                self.check_one_copy()

    def test_a_copy_that_is_not_what_it_was_is_uploaded_again(self):
        self.serve_weights(1)
        self.check_one_copy()
        self.daemon.kill()
        record = json.loads((self.daemon.state / "parked.json").read_text())
        name = record["devices"][0]["segments"][0]["name"]
        os.pwrite(dict(self.daemon.keeper.stored)[name], b"spoilt", 512)
        self.daemon.start()
        load = self.last_load()
        self.assertEqual(load["source"], "restore")
        self.assertIn("device_upload", self.phases())
        self.assertIn("what the fd store kept of it was not taken", " ".join(load["warnings"]))
        self.check_one_copy()
