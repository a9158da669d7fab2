"""One device copy for every process, with real processes on the fake driver."""
import contextlib
import os
import re
import signal
import urllib.request

import harness
from device_case import CONFIG, GRANULARITY, DeviceCase
from harness import DAEMON, EXIT_RESOURCES, footprint, many, smoke, wait_for

RESOURCE = ("--strategy", "resource", "--allow-downtime")


class OneCopy(DeviceCase):
    gpu_env = {"FAKECUDA_MEM_MB": "64"}

    @smoke
    def test_publish_load_import_swap_rollback(self):
        self.assertEqual([gpu["mode"] for gpu in self.gpus], ["vmm_fd"])
        self.serve("planner", 1, tensors=4, tensor_bytes=64 << 10)
        worker = self.worker()
        got = worker.ok("acquire", "a", "planner")
        self.assertEqual((got["version"], got["mode"], got["gpu"]), (1, "vmm_fd", self.gpus[0]["uuid"]))
        self.same_bytes(worker, "a", 4)
        self.publish("planner", 2, tensors=4, tensor_bytes=64 << 10)
        self.ctl("swap", "planner", "--version", 2)
        wait_for("the label to move", lambda: worker.ok("superseded", "a")["superseded"])
        self.same_bytes(worker, "a", 4)  # What it has stays.
        self.assertEqual(worker.ok("acquire", "b", "planner")["version"], 2)
        self.same_bytes(worker, "b", 4)
        first = worker.ok("tensors", "b")["tensors"][0]
        self.assertNotEqual(worker.ok("sha256", "a", first)["sha256"],
                            worker.ok("sha256", "b", first)["sha256"])
        self.ctl("rollback", "planner")
        self.assertEqual(worker.ok("acquire", "c", "planner")["version"], 1)
        self.same_bytes(worker, "c", 4)

    def test_what_is_there_is_shown(self):
        self.serve("planner", 1)
        worker = self.worker()
        worker.ok("acquire", "a", "planner")
        uuid = self.gpus[0]["uuid"]
        gpu = self.status()["devices"][0]
        self.assertEqual((gpu["usable"], gpu["copies"], gpu["copiedBytes"], gpu["importers"]),
                         (True, 1, GRANULARITY, 1))
        self.assertEqual(gpu["reservedBytes"], GRANULARITY)
        self.assertIn("self-test", gpu["reason"])
        model = self.json("ls")["items"][0]
        self.assertEqual((model["deviceBytes"], model["device"]), (GRANULARITY, '"all"'))
        self.assertRegex(self.ctl("ls").out, r"2\.0 MiB")
        described = self.json("describe", "planner@1")["version"]
        self.assertEqual(described["deviceState"], "RESIDENT")
        self.assertEqual([copy["gpu"] for copy in described["devices"]], [uuid])
        phases = {phase["name"] for phase in described["lastLoad"]["phases"]}
        self.assertLessEqual({"device_create", "device_upload", "device_verify"}, phases)
        lease = self.json("leases")["items"][0]
        self.assertEqual((lease["gpu"], lease["transport"]), (uuid, "device_vmm_fd"))
        self.assertIn(uuid, self.ctl("status").out)
        self.assertRegex(self.ctl("doctor", expect=None).out, uuid + r".*driver \d.*vmm_fd")

    def ctl(self, *arguments, expect=0, **options):
        if expect is None:
            return self.daemon.ctl(*arguments)
        return super().ctl(*arguments, expect=expect, **options)

    def test_any_number_of_importers_has_one_copy(self):
        self.serve("planner", 1, tensors=8, tensor_bytes=1 << 20)
        alone = self.copies()
        self.assertEqual(alone[0], 1)
        workers = []
        for count in (1, 8, 32):
            while len(workers) < count:
                workers.append(self.worker())
                workers[-1].ok("acquire", "a", "planner")
            inodes, size = self.copies()
            print(f"device bytes for {count} importers: {size / alone[1]:.2f}x", end=" ", flush=True)
            self.assertEqual((inodes, size), alone)
        for worker in workers[:3]:
            self.same_bytes(worker, "a", 8)
        self.assertEqual(self.status()["devices"][0]["importers"], 32)

    def test_a_store_through_the_import_faults_and_spoils_nothing(self):
        self.serve("planner", 1)
        good, bad, asks = self.worker(), self.worker(), self.worker()
        for worker in (good, bad, asks):
            worker.ok("acquire", "a", "planner")
        name = good.ok("tensors", "a")["tensors"][0]
        self.assertEqual(bad.dies("store", "a", name), signal.SIGSEGV)
        self.assertNotEqual(asks.ok("write", "a", name)["rc"], 0)
        self.same_bytes(good, "a", 4)
        self.wait_leases(2)

    def test_an_importer_that_is_killed_leaves_nothing(self):
        self.serve("planner", 1)
        before = self.copies()
        worker = self.worker()
        worker.ok("acquire", "a", "planner")
        worker.kill()
        self.wait_leases(0)
        self.assertEqual(self.copies(), before)
        self.ctl("label", "rm", "planner:stable")
        self.ctl("unload", "planner@1")
        wait_for("the device to be free", lambda: self.copies() == (0, 0))

    def test_who_maps_it_keeps_it_when_daemon_and_agent_die(self):
        self.serve("planner", 1)
        worker = self.worker()
        worker.ok("acquire", "a", "planner")
        self.kill_agents()
        self.same_bytes(worker, "a", 4)
        self.daemon.kill()
        self.same_bytes(worker, "a", 4)
        wait_for("the agents to end with the daemon", lambda: not self.agents())
        self.daemon.start()
        self.found_gpus()
        wait_for("the lease to be declared again",
                 lambda: [lease["gpu"] for lease in self.json("leases")["items"]] ==
                 [self.gpus[0]["uuid"]])
        self.same_bytes(worker, "a", 4)
        self.assertEqual(worker.ok("acquire", "b", "planner", "device", "-", 20000)["version"], 1)
        self.same_bytes(worker, "b", 4)

    def test_an_agent_that_is_killed_is_replaced(self):
        self.serve("planner", 1)
        self.kill_agents()
        self.publish("planner", 2)
        self.ctl("swap", "planner", "--version", 2)
        worker = self.worker()
        self.assertEqual(worker.ok("acquire", "a", "planner")["version"], 2)
        self.same_bytes(worker, "a", 4)

    def test_a_device_that_is_full_names_who_holds_it(self):
        self.serve("planner", 1, tensors=4, tensor_bytes=8 << 20)
        self.publish("planner", 2, tensors=4, tensor_bytes=8 << 20)
        worker = self.worker()
        worker.ok("acquire", "a", "planner")
        refused = self.ctl("swap", "planner", "--version", 2, expect=EXIT_RESOURCES)
        self.assertIn(self.gpus[0]["uuid"], refused.err)
        self.assertIn("planner@1", refused.err)
        self.same_bytes(worker, "a", 4)
        worker.ok("release", "a")
        self.ctl("swap", "planner", "--version", 2, *RESOURCE)
        self.assertEqual(worker.ok("acquire", "b", "planner")["version"], 2)
        self.same_bytes(worker, "b", 4)

    def test_swaps_leave_no_descriptor_and_no_byte(self):
        self.serve("planner", 1)
        self.publish("planner", 2)
        self.ctl("swap", "planner", "--version", 2)
        self.ctl("swap", "planner", "--version", 1)
        worker = self.worker()
        worker.ok("follow", "a", "planner")

        def swap(number):
            self.ctl("swap", "planner", "--version", number)
            wait_for("it to be adopted", lambda: worker.ok("adopt", "a")["version"] == number)
            other = 3 - number
            wait_for("the other to be free of leases", lambda: not self.json("versions", "planner")[
                "items"][other - 1]["leases"])
            self.ctl("unload", f"planner@{other}")
        swap(2)
        swap(1)

        def counts():
            return (footprint(self.daemon.process.pid)["fds"], footprint(worker.pid)["fds"],
                    footprint(worker.pid)["maps"], self.copies())
        before = counts()
        for _ in range(many(6, 500)):
            swap(2)
            swap(1)
        wait_for(f"nothing over the baseline {before}, now {counts()}", lambda: all(
            now <= then for now, then in zip(counts(), before)))
        self.same_bytes(worker, "a", 4)


class RoomForOne(DeviceCase):
    gpu_env = {"FAKECUDA_MEM_MB": "3"}

    def test_agents_that_are_killed_in_every_look_cost_no_copy(self):
        """As when the kernel ends them for want of host memory: the copy is there all the time."""
        self.serve("planner", 1)
        worker = self.worker()
        worker.ok("acquire", "a", "planner")
        killed = set()

        def enough():
            for _ in range(20):  # Two in one look: the second as soon as it is there.
                for pid in self.agents():
                    killed.add(pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            return len(killed) >= 12
        wait_for("a dozen agents to be killed", enough)
        wait_for("the GPU to answer", lambda: self.status()["devices"][0]["usable"])
        gpu = self.status()["devices"][0]
        self.assertEqual((gpu["lostCopies"], gpu["copies"], gpu["reservedBytes"]),
                         (0, 1, GRANULARITY))
        self.assertEqual(worker.ok("acquire", "b", "planner")["version"], 1)
        self.same_bytes(worker, "b", 4)


class Layers(DeviceCase):
    gpu_env = {"FAKECUDA_DEVICES": "2"}
    config = CONFIG.replace('"all"', "{ tensors = ['layer\\.[01]\\..*'] }")

    def test_patterns_choose_tensors_and_every_gpu_has_them(self):
        self.serve("planner", 1)
        both = [gpu["uuid"] for gpu in self.gpus]
        self.assertEqual(len(set(both)), 2)
        for uuid in both:
            worker = self.worker()
            got = worker.ok("acquire", "a", "planner", "device", uuid)
            self.assertEqual(got["gpu"], uuid)
            self.assertEqual(worker.ok("tensors", "a")["tensors"],
                             ["layer.0.weight", "layer.1.weight"])
            self.same_bytes(worker, "a", 2)

    def test_a_process_that_sees_the_second_gpu_alone_gets_that_one(self):
        self.serve("planner", 1)
        worker = self.worker(env=self.fake(**self.gpu_env, CUDA_VISIBLE_DEVICES="1"))
        self.assertEqual(worker.ok("acquire", "a", "planner")["gpu"], self.gpus[1]["uuid"])
        self.same_bytes(worker, "a", 2)


class OneGpuOfTwo(DeviceCase):
    gpu_env = {"FAKECUDA_DEVICES": "2"}
    config = CONFIG + '[[models]]\nname = "detector"\ndevice = "GPU-not-here"\n'

    def test_a_gpu_that_is_not_here_is_a_warning(self):
        self.serve("detector", 1)
        report = self.json("describe", "detector@1")["version"]
        self.assertIn("GPU-not-here", " ".join(report["lastLoad"]["warnings"]))
        worker = self.worker()
        refused = worker.call("acquire", "a", "detector", "device")
        self.assertEqual(refused["status"], "FAILED_PRECONDITION")
        self.assertEqual(worker.ok("acquire", "b", "detector", "ifany")["mode"], "none")


class Mode(DeviceCase):
    """Each mode, as attributes and the self-test choose it."""

    start_daemon = False

    def begin(self, mode, config=CONFIG, **gpu_env):
        self.gpu_env = gpu_env
        self.daemon = self.new_daemon(config=config, env=self.fake(**gpu_env))
        self.found_gpus()
        self.assertEqual([gpu["mode"] for gpu in self.gpus], [mode], self.status())
        self.serve("planner", 1)
        # A legacy handle names a process, which must be one's own to be looked into.
        return self.worker(user=DAEMON) if mode == "cuda_ipc" else self.worker()

    def test_cuda_ipc(self):
        worker = self.begin("cuda_ipc", FAKECUDA_ATTR_102="0")
        self.assertEqual(worker.ok("acquire", "a", "planner")["mode"], "cuda_ipc")
        self.same_bytes(worker, "a", 4)
        self.assertIn("unprotected", self.gpus[0]["limits"])

    def test_copies_that_an_agent_took_along_are_lost_and_made_again(self):
        worker = self.begin("cuda_ipc", FAKECUDA_ATTR_102="0")
        worker.ok("acquire", "a", "planner")
        self.kill_agents()
        wait_for("the label to have another generation",
                 lambda: worker.ok("superseded", "a")["superseded"])
        self.assertEqual(worker.ok("acquire", "b", "planner", "device", "-", 20000)["version"], 1)
        self.same_bytes(worker, "b", 4)
        self.assertEqual(self.status()["devices"][0]["lostCopies"], 1)
        self.assertIn("device_lost", self.daemon.log.read_text())

    def test_swaps_and_unloads_do_not_wait_for_an_agent_that_hangs(self):
        models = ("m1", "m2", "m3")
        config = CONFIG.replace('"200ms"', '"1h"') + "".join(
            f'[[models]]\nname = "{name}"\ndevice = "all"\n' for name in models)
        self.begin("cuda_ipc", config, FAKECUDA_ATTR_102="0")
        for seed, name in enumerate(models, 11):  # Files of their own.
            self.publish(name, 1, seed=seed)
            self.ctl("load", f"{name}@1")
        self.serve("other", 1)
        self.publish("other", 2)

        def reserved():
            return self.status()["devices"][0]["reservedBytes"]
        self.assertEqual(reserved(), 4 * GRANULARITY)
        stopped = self.agents()

        def go_on():
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        self.addCleanup(go_on)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        for name in models:
            self.ctl("unload", f"{name}@1")
        self.ctl("swap", "other", "--version", 2)
        self.ctl("rollback", "other")
        self.assertEqual(reserved(), 4 * GRANULARITY, "the agent was waited for")
        go_on()
        wait_for("the memory to be given back", lambda: reserved() == GRANULARITY)

    def test_host_direct(self):
        worker = self.begin("host_direct", FAKECUDA_ATTR_88="1", FAKECUDA_ATTR_100="1")
        self.assertEqual(worker.ok("acquire", "a", "planner")["mode"], "host_direct")
        self.assertEqual(len(worker.ok("tensors", "a")["tensors"]), 4)
        self.assertEqual(self.status()["devices"][0]["copiedBytes"], 0)

    def test_host_registered_only_when_it_is_allowed(self):
        env = {"FAKECUDA_ATTR_102": "0", "FAKECUDA_ATTR_18": "1", "FAKECUDA_ATTR_99": "1",
               "FAKECUDA_NO_IPC": "1"}
        worker = self.begin("host_registered", env and CONFIG.replace(
            "[device]\n", "[device]\nallow_registered = true\n"), **env)
        self.assertEqual(worker.ok("acquire", "a", "planner")["mode"], "host_registered")
        self.same_bytes(worker, "a", 4)
        self.assertIn("unprotected", self.gpus[0]["limits"])

    def test_host_only(self):
        worker = self.begin("host_only", FAKECUDA_ATTR_102="0", FAKECUDA_NO_IPC="1")
        refused = worker.call("acquire", "a", "planner", "device")
        self.assertEqual(refused["status"], "FAILED_PRECONDITION")
        self.assertEqual(worker.ok("acquire", "b", "planner", "ifany")["mode"], "none")
        self.assertIn("attribute 102", self.gpus[0]["reason"])


class NoGpu(DeviceCase):
    start_daemon = False

    def serves_the_host(self, env, reason, client_env):
        self.daemon = self.new_daemon(config=CONFIG, env=env)
        self.assertEqual(self.found_gpus(), [])
        self.assertRegex(self.status()["reason"], reason)
        self.serve("planner", 1)
        worker = self.worker(env=client_env)
        self.assertEqual(worker.ok("acquire", "a", "planner", "host")["version"], 1)
        refused = worker.call("acquire", "b", "planner", "device")
        self.assertFalse(refused["ok"], refused)
        self.assertEqual(worker.ok("acquire", "c", "planner", "ifany")["mode"], "none")
        return refused

    def test_no_driver(self):
        refused = self.serves_the_host({}, "libcuda", {})
        self.assertIn("libcuda", refused["message"])

    def test_the_toolkits_stub(self):
        stub = self.fake(FAKECUDA_INIT="34")
        self.serves_the_host(stub, "34", stub)

    def test_a_driver_that_hangs_holds_up_no_stop(self):
        self.daemon = self.new_daemon(config=CONFIG, env=self.fake(FAKECUDA_FAIL="cuInit:1:hang"))
        wait_for("an agent", self.agents)
        self.assertIn("still looking", self.status()["reason"])
        self.assertEqual(self.daemon.stop(), 0)  # Not by force.

    def test_switched_off(self):
        self.daemon = self.new_daemon(config=CONFIG.replace("[device]", "[device]\nenabled = false"),
                                      env=self.fake())
        self.assertEqual(self.found_gpus(), [])
        self.assertIn("configuration", self.status()["reason"])
        self.assertEqual(self.agents(), [])


class Metrics(DeviceCase):
    def setUp(self):
        super().setUp()
        self.daemon.stop()
        self.daemon.metrics = "127.0.0.1:0"
        self.daemon.start()
        self.found_gpus()

    def test_what_is_measured(self):
        self.serve("planner", 1)
        worker = self.worker()
        worker.ok("acquire", "a", "planner")
        address = self.json("status")["metricsAddress"]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        uuid = self.gpus[0]["uuid"]
        for line in (f'modelhost_gpu_resident_bytes{{model="planner",version="1",gpu="{uuid}"}} 2097152',
                     f'modelhost_gpu_importers{{gpu="{uuid}"}} 1',
                     f'modelhost_gpu_usable{{gpu="{uuid}"}} 1',
                     f'modelhost_gpu_self_test_passed{{gpu="{uuid}"}} 1',
                     f'modelhost_gpu_lost_copies{{gpu="{uuid}"}} 0'):
            self.assertIn(line, text)
        self.assertRegex(text, rf'modelhost_memory_budget_bytes{{pool="{re.escape(uuid)}"}} \d')
        self.assertRegex(text, r'modelhost_model_load_phase_duration_seconds_count'
                               r'{model="planner",phase="gpu_copy"} 1')


if __name__ == "__main__":
    harness.unittest.main()
