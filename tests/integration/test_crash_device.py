"""kill -9 at every step of a load that makes copies on a GPU (on the fake driver).

After each, the next daemon has the version on the GPU, with the right bytes, and no byte of device
memory is left over from the one that died.
"""
import os

import harness
from crash_case import REQUIRED, CrashCase, Faulty
from device_case import GRANULARITY, DeviceWorker, device_memory, fake
from harness import wait_for

MACHINES = iter(range(1, 1 << 30))


class OnGpu(Faulty):
    """Each on a machine of its own, as far as the fake driver goes."""

    machine = None

    def __init__(self, folder, **options):
        self.machine = f"c{os.getpid()}x{next(MACHINES)}"
        super().__init__(folder, **options)
        self.env = self.gpu()

    def gpu(self):
        return fake(FAKECUDA_MACHINE=self.machine)

    def faulty(self, **env):
        super().faulty(**env)
        self.env = {**self.env, **self.gpu()}
        return self

    def product(self):
        super().product()
        self.env = self.gpu()
        return self


class CrashWhileCopying(CrashCase):
    config = REQUIRED.replace("required = true", 'required = true\ndevice = "all"')

    def daemon_on(self, folder):
        daemon = OnGpu(folder, wait=False, config=self.config)
        self.addCleanup(self._finish, daemon)
        return daemon

    def test_a_load_with_a_copy(self):
        def check(daemon, _client):
            self.do(daemon, "load", "planner@2")
            # One piece for each of planner 1 and 2, detector 1: what the dead one had is gone.
            wait_for("the copies of this daemon alone",
                     lambda: len(device_memory(daemon.machine)) == 3)
            worker = DeviceWorker(daemon, env=daemon.gpu())
            try:
                self.assertEqual(worker.ok("acquire", "a", "planner@2")["mode"], "vmm_fd")
                answer = worker.ok("compare", "a")
                self.assertGreater(answer["tensors"], 0)
                self.assertEqual(answer["differ"], 0)
            finally:
                worker.close()
            gpu, = self.rows(daemon, "status")["device"]["devices"]
            self.assertEqual(gpu["reservedBytes"], 3 * GRANULARITY, "each is booked once")
            self.assertEqual(daemon.stop(), 0)
            wait_for("the GPU to be empty", lambda: not device_memory(daemon.machine))
            daemon.start()

        self.kill_at_each_step(lambda daemon: daemon.ctl_start("load", "planner@2"), check,
                               only=("load.device_",))


if __name__ == "__main__":
    harness.unittest.main()
