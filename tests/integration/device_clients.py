"""Clients with device memory, on a machine with GPUs of the fake driver's that is a test's own."""
import json
import os
import subprocess

import harness
from harness import CLIENT, Case, as_user, end_with_us, environment, wait_for

GPU0 = "GPU-00fafafa-fafa-fafa-fafa-fafafafafa00"
GPU1 = "GPU-01fafafa-fafa-fafa-fafa-fafafafafa01"


class DeviceClient:
    """A device_worker process; commands are words, answers are dictionaries."""

    def __init__(self, daemon, env, user=CLIENT):
        self.process = subprocess.Popen(
            [str(harness.PROGRAMS.device_worker), str(daemon.runtime)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env=environment(**env), cwd="/",
            preexec_fn=end_with_us, **as_user(user))

    @property
    def pid(self):
        return self.process.pid

    def call(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"a client died with {self.process.wait()}")
        return json.loads(line)

    def ok(self, *words):
        answer = self.call(*words)
        if not answer["ok"]:
            raise AssertionError(f"{words}: {answer}")
        return answer

    def dies(self, *words):
        """A command that ends the process; its exit status."""
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self.process.wait(harness.DEADLINE_S)

    def kill(self):
        self.process.kill()
        self.close()

    def close(self):
        if not self.process.stdin.closed:
            try:
                self.process.stdin.close()
            except BrokenPipeError:
                pass
        try:
            self.process.wait(harness.DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class ClientCase(Case):
    """A daemon on a machine with GPUs of the fake driver's. `model` has a copy on each."""

    gpus = 1
    more_env = {}
    config = '[[models]]\nname = "planner"\ndevice = "all"\n'
    start_daemon = False

    def setUp(self):
        super().setUp()
        self.machine = f"{os.getpid()}-{self.id().rsplit('.', 1)[1]}"
        self.env = {"LD_LIBRARY_PATH": f"{harness.PROGRAMS.lib}:{harness.PROGRAMS.fakecuda}",
                    "FAKECUDA_MACHINE": self.machine, "FAKECUDA_DEVICES": str(self.gpus),
                    "FAKECUDA_GRANULARITY_KB": "64", **self.more_env}
        self.daemon = self.new_daemon(config=self.config, env=self.env)

    def device_client(self, user=CLIENT, **more_env):
        client = DeviceClient(self.daemon, {**self.env, **more_env}, user=user)
        self.addCleanup(client.close)
        return client

    def devices(self):
        return self.json("status")["device"]["devices"]

    def expect_whole(self, client, key="a", tensors=None):
        """The GPU has what the host has, of every tensor (or of so many)."""
        seen = client.ok("compare", key)
        self.assertEqual(seen["differ"], 0)
        self.assertEqual(seen["tensors"], seen["of"] if tensors is None else tensors)
        self.assertGreater(seen["tensors"], 0)

    def wait_version(self, client, verb, version, key="a"):
        def there():
            answer = client.call(verb, key)
            return answer["ok"] and answer["version"] == version
        wait_for(f"version {version} by {verb}", there)
