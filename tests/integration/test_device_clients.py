"""What a client of a GPU's copy sees of it: remaps, forks, which GPU it is on, and why there is none."""
import harness
from device_case import CONFIG, DeviceCase
from harness import wait_for

GPU0 = "GPU-00fafafa-fafa-fafa-fafa-fafafafafa00"
GPU1 = "GPU-01fafafa-fafa-fafa-fafa-fafafafafa01"


class OneGpu(DeviceCase):
    def test_addresses_stay_from_version_to_version(self):
        self.serve("planner", 7)
        self.publish("planner", 8)
        self.publish("planner", 9, tensors=5)
        worker = self.worker()
        worker.ok("follow", "a", "planner", "-", "same")
        addresses = worker.ok("addresses", "a")["addresses"]
        first = worker.ok("sha256", "a", "layer.0.weight")["sha256"]
        self.ctl("swap", "planner", "--version", 8)
        wait_for("version 8", lambda: worker.ok("remap", "a")["version"] == 8)
        self.assertEqual(worker.ok("addresses", "a")["addresses"], addresses)
        self.assertNotEqual(worker.ok("sha256", "a", "layer.0.weight")["sha256"], first)
        self.same_bytes(worker, "a", 4)
        # Another layout: the old one stays, and what differs is said.
        self.ctl("swap", "planner", "--version", 9)
        refused = wait_for("a refusal", lambda: next(
            (answer for answer in [worker.call("remap", "a")] if not answer["ok"]), None))
        self.assertEqual((refused["status"], refused["version"]), ("FAILED_PRECONDITION", 8))
        self.assertIn("remap planner@8 to planner@9", refused["message"])
        self.assertEqual(worker.ok("addresses", "a")["addresses"], addresses)
        self.same_bytes(worker, "a", 4)

    def test_followers_come_along_with_a_swap_and_a_rollback(self):
        self.serve("planner", 7)
        self.publish("planner", 8)
        worker = self.worker()
        worker.ok("follow", "a", "planner")
        worker.ok("acquire", "old", "planner")
        for version, verb in ((8, ("swap", "planner", "--version", 8)), (7, ("rollback", "planner"))):
            self.ctl(*verb)
            wait_for("it to come", lambda: worker.ok("adopt", "a")["version"] == version)
            self.same_bytes(worker, "a", 4)
            self.same_bytes(worker, "old", 4)

    def test_a_forked_child_has_no_device_memory(self):
        self.serve("planner", 7)
        worker = self.worker()
        worker.ok("acquire", "a", "planner")
        self.assertEqual(worker.ok("fork", "a")["child_sees"], "nothing")
        self.same_bytes(worker, "a", 4)

    def test_who_has_no_gpu_is_served_on_the_host_and_told_why(self):
        self.serve("planner", 7)
        worker = self.worker(env=self.fake(FAKECUDA_INIT="34"))
        refused = worker.call("acquire", "a", "planner")
        self.assertEqual(refused["status"], "FAILED_PRECONDITION")
        self.assertIn("CUDA_ERROR_STUB_LIBRARY (34)", refused["message"])
        got = worker.ok("acquire", "a", "planner", "ifany")
        self.assertEqual((got["mode"], got["gpu"]), ("none", ""))
        self.assertIn("CUDA_ERROR_STUB_LIBRARY (34)", got["reason"])

    def test_a_model_without_a_copy_says_so(self):
        self.serve("detector", 1)
        worker = self.worker()
        refused = worker.call("acquire", "a", "detector")
        self.assertEqual(refused["status"], "FAILED_PRECONDITION")
        self.assertIn(GPU0, refused["message"])
        self.assertIn(GPU0, worker.ok("acquire", "a", "detector", "ifany")["reason"])


class NamedGpu(DeviceCase):
    gpu_env = {"FAKECUDA_DEVICES": "2"}
    config = CONFIG.replace('"all"', f'"{GPU1}"')

    def test_what_the_policy_names_is_on_that_gpu_alone(self):
        self.serve("planner", 7)
        worker = self.worker()
        self.assertEqual(worker.call("acquire", "a", "planner", "device", GPU0)["status"],
                         "FAILED_PRECONDITION")
        worker.ok("acquire", "a", "planner", "device", GPU1)
        self.same_bytes(worker, "a", 4)
        other = self.worker(env=self.fake(**self.gpu_env, CUDA_VISIBLE_DEVICES="0"))
        refused = other.call("acquire", "a", "planner", "device", GPU1)
        self.assertEqual(refused["status"], "FAILED_PRECONDITION")
        self.assertIn("CUDA_VISIBLE_DEVICES", refused["message"])


if __name__ == "__main__":
    harness.unittest.main()
