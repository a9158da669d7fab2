"""What a client of a GPU's copy sees of it: swaps, remaps, restarts, forks, and why there is none."""
import unittest

from device_clients import GPU0, GPU1, ClientCase
from harness import smoke, wait_for


class OneGpu(ClientCase):
    @smoke
    def test_tensors_reach_a_client_on_its_gpu(self):
        self.serve("planner", 7)
        client = self.device_client()
        got = client.ok("acquire", "a", "planner")
        self.assertEqual((got["version"], got["gpu"], got["mode"], got["reason"]),
                         (7, GPU0, "vmm_fd", ""))
        self.expect_whole(client)
        seen = client.ok("sha256", "a", "layer.2.weight")
        self.assertEqual(seen["sha256"], seen["host_sha256"])
        self.assertEqual(client.ok("superseded", "a")["superseded"], 0)
        device, = self.devices()
        self.assertEqual((device["uuid"], device["mode"], device["importers"]), (GPU0, "vmm_fd", 1))
        self.assertGreater(self.version_row("planner", 7)["deviceBytes"], 0)

    def test_a_swap_reaches_followers_and_a_rollback_too(self):
        self.serve("planner", 7)
        self.publish("planner", 8)
        client = self.device_client()
        client.ok("follow", "a", "planner")
        client.ok("acquire", "old", "planner")
        for version, verb in ((8, ("swap", "planner", "--version", "8")), (7, ("rollback", "planner"))):
            self.ctl(*verb)
            self.wait_version(client, "adopt", version)
            self.expect_whole(client)
            self.expect_whole(client, "old")

    def test_addresses_stay_from_version_to_version(self):
        self.serve("planner", 7)
        self.publish("planner", 8)
        self.publish("planner", 9, tensors=5)
        client = self.device_client()
        client.ok("follow", "a", "planner", "-", "same")
        addresses = client.ok("addresses", "a")["addresses"]
        self.ctl("swap", "planner", "--version", "8")
        self.wait_version(client, "remap", 8)
        self.assertEqual(client.ok("addresses", "a")["addresses"], addresses)
        self.expect_whole(client)
        # Another layout: the old one stays, and what differs is said.
        self.ctl("swap", "planner", "--version", "9")
        refused = wait_for("a refusal", lambda: next(
            (answer for answer in [client.call("remap", "a")] if not answer["ok"]), None))
        self.assertEqual((refused["status"], refused["version"]), ("FAILED_PRECONDITION", 8))
        self.assertIn("remap planner@8 to planner@9", refused["message"])
        self.assertEqual(client.ok("addresses", "a")["addresses"], addresses)
        self.expect_whole(client)

    def test_device_memory_outlives_the_daemon_and_its_leases_come_back(self):
        self.serve("planner", 7)
        client = self.device_client()
        client.ok("acquire", "a", "planner")
        addresses = client.ok("addresses", "a")["addresses"]
        self.daemon.kill()
        self.expect_whole(client)
        self.daemon.start()
        self.wait_leases(1)
        self.assertEqual(client.ok("addresses", "a")["addresses"], addresses)
        self.expect_whole(client)
        self.assertEqual(client.ok("superseded", "a")["superseded"], 0)
        client.ok("acquire", "b", "planner", "device", "-", 20000)
        self.expect_whole(client, "b")
        wait_for("both as importers", lambda: self.devices()[0]["importers"] >= 1)

    def test_a_forked_child_has_no_device_memory(self):
        self.serve("planner", 7)
        client = self.device_client()
        client.ok("acquire", "a", "planner")
        self.assertEqual(client.ok("fork", "a")["child_sees"], "nothing")
        self.expect_whole(client)

    def test_who_has_no_gpu_is_served_on_the_host_and_told_why(self):
        self.serve("planner", 7)
        client = self.device_client(FAKECUDA_INIT="34")
        refused = client.call("acquire", "a", "planner")
        self.assertEqual(refused["status"], "FAILED_PRECONDITION")
        self.assertIn("CUDA_ERROR_STUB_LIBRARY (34)", refused["message"])
        got = client.ok("acquire", "a", "planner", "ifany")
        self.assertEqual((got["mode"], got["gpu"]), ("none", ""))
        self.assertIn("CUDA_ERROR_STUB_LIBRARY (34)", got["reason"])

    def test_a_model_without_a_copy_says_so(self):
        self.serve("detector", 1)
        client = self.device_client()
        refused = client.call("acquire", "a", "detector")
        self.assertEqual(refused["status"], "FAILED_PRECONDITION")
        self.assertIn(GPU0, refused["message"])
        self.assertIn(GPU0, client.ok("acquire", "a", "detector", "ifany")["reason"])


class SomeTensors(ClientCase):
    config = ('[[models]]\nname = "planner"\n'
              f'device = {{ gpu = "{GPU1}", tensors = ["layer\\\\.[0-2]\\\\..*"] }}\n')
    gpus = 2

    def test_what_the_policy_names_is_on_the_gpu_that_it_names(self):
        self.serve("planner", 7)
        client = self.device_client()
        self.assertEqual(client.call("acquire", "a", "planner", "device", GPU0)["status"],
                         "FAILED_PRECONDITION")
        client.ok("acquire", "a", "planner", "device", GPU1)
        self.assertEqual(client.ok("tensors", "a")["tensors"],
                         [f"layer.{i}.weight" for i in range(3)])
        self.expect_whole(client, tensors=3)

    def test_a_gpu_has_its_name_wherever_it_is_counted(self):
        self.serve("planner", 7)
        client = self.device_client(CUDA_VISIBLE_DEVICES="1")
        self.assertEqual(client.ok("acquire", "a", "planner")["gpu"], GPU1)
        self.expect_whole(client, tensors=3)
        other = self.device_client(CUDA_VISIBLE_DEVICES="0")
        refused = other.call("acquire", "a", "planner", "device", GPU1)
        self.assertEqual(refused["status"], "FAILED_PRECONDITION")
        self.assertIn("CUDA_VISIBLE_DEVICES", refused["message"])


if __name__ == "__main__":
    unittest.main()
