"""kill -9 at every step of a load that makes copies on a GPU (of the fake driver).

After each, the agents have ended with the daemon and nothing is left on the GPU but what the next
daemon has there: one copy of each version that is resident, booked once.
"""
import uuid

import fakegpu
from crash_case import REQUIRED, CrashCase, Faulty
from harness import wait_for


class FaultyOnAGpu(Faulty):
    def __init__(self, *arguments, **options):
        self.machine = uuid.uuid4().hex[:12]
        super().__init__(*arguments, **options)

    def faulty(self, **env):
        super().faulty(**env)
        self.env = {**self.env, **fakegpu.environment(self.machine)}
        return self

    def product(self):
        super().product()
        self.env = fakegpu.environment(self.machine)
        return self


class CrashOnAGpu(CrashCase):
    config = REQUIRED.replace('name = "planner"', 'name = "planner"\ndevice = "all"')

    def daemon_on(self, folder):
        daemon = FaultyOnAGpu(folder, wait=False, config=self.config)
        self.addCleanup(self._finish, daemon)
        return daemon

    def check_device(self, daemon, versions):
        def booked_and_there():
            copies = [copy for version in versions for copy in self.rows(
                daemon, "describe", f"planner@{version}")["version"]["devices"]]
            self.assertEqual([copy["mode"] for copy in copies], ["vmm_fd"] * len(versions))
            gpu, = self.rows(daemon, "status")["device"]["devices"]
            held = sum(copy["bytes"] for copy in copies)
            return ((gpu["reservedBytes"], gpu["copiedBytes"]) == (held, held) and
                    fakegpu.segments(daemon.machine) == sum(copy["segments"] for copy in copies))
        wait_for("one copy of each version on the GPU", booked_and_there)

    def test_load_on_a_gpu(self):
        def check(daemon, client):
            self.check_device(daemon, [1])
            self.do(daemon, "load", "planner@2")
            client.ok("acquire", ref="planner@2", key="new")
            self.assertEqual(client.ok("seeds", key="new")["seeds"], [2])
            client.ok("release", key="new")
            self.check_device(daemon, [1, 2])
            self.do(daemon, "unload", "planner@2")
            self.check_device(daemon, [1])
            self.assertEqual(daemon.stop(), 0)
            wait_for("the GPU to be empty", lambda: fakegpu.segments(daemon.machine) == 0)
            daemon.start()

        self.kill_at_each_step(lambda daemon: daemon.ctl_start("load", "planner@2"), check,
                               only=("load.device_",))
