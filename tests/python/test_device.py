"""Copies on a GPU, on the fake driver (tests/fakes/fakecuda): what the package says of them.

A process with a driver is one of its own: none of it is in the process of the tests.
"""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import case  # noqa: E402
import device_case  # noqa: E402
import harness  # noqa: E402

CAPSULES = (pathlib.Path(__file__).resolve().parent / "capsules.py").read_text()


class OnGpu(device_case.DeviceCase):
    gpu_env = {"FAKECUDA_MEM_MB": "64"}
    script = case.Case.script

    def setUp(self):
        case.package()
        if not harness.PROGRAMS.fakecuda.is_dir():
            self.skipTest("the fake driver is not built (MODELHOST_TESTS)")
        super().setUp()

    def test_a_handle_on_a_gpu_says_so_in_every_protocol(self):
        self.serve("planner", 1)
        uuid = self.gpus[0]["uuid"]
        self.script("""
            uuid = sys.argv[1]
            client = modelhost.connect(runtime)
            for device in ("cuda", "auto", uuid):
                handle = client.acquire("planner", device=device)
                assert (handle.gpu, handle.device_mode, handle.device_reason) == (uuid, "vmm_fd", "")
                tensor = handle["layer.0.weight"]
                assert tensor.device_ptr and tensor.device_ptr != tensor.data_ptr
                assert tensor.__dlpack_device__() == (2, 0), tensor.__dlpack_device__()
                cuda = tensor.__cuda_array_interface__
                assert cuda["data"] == (tensor.device_ptr, True), cuda
                assert (cuda["shape"], cuda["typestr"], cuda["version"]) == (tensor.shape, "<i8", 3)
                assert tensor.numpy().ctypes.data == tensor.data_ptr
                host = tensor.__dlpack__(dl_device=(1, 0))
                tensor.__dlpack__(stream=1, max_version=(1, 0), dl_device=(2, 0))
            plain = client.acquire("planner")
            assert (plain.gpu, plain.device_mode) == ("", "none")
            assert plain["layer.0.weight"].__dlpack_device__() == (1, 0)
            assert not hasattr(plain["layer.0.weight"], "__cuda_array_interface__")
            try:
                client.acquire("planner", device="GPU-00000000-0000-0000-0000-000000000000")
            except modelhost.FailedPrecondition as error:
                assert "GPU-00000000" in str(error), error
            else:
                raise AssertionError("there is no such GPU")
        """, uuid, env=self.fake(**self.gpu_env))

    def test_a_capsule_of_device_memory_names_the_device(self):
        self.serve("planner", 1)
        out = self.script("""
            exec(sys.argv[1])
            tensor = modelhost.connect(runtime).acquire("planner", device="cuda")["layer.0.weight"]
            for version in (None, (1, 0)):
                _, managed = opened(tensor.__dlpack__(max_version=version))
                made = managed.tensor
                print((made.device_type, made.device_id, made.data == tensor.device_ptr))
        """, CAPSULES, env=self.fake(**self.gpu_env))
        self.assertEqual(out.splitlines(), ["(2, 0, True)"] * 2)

    def test_without_a_driver_the_host_serves_and_the_reason_is_there(self):
        self.serve("planner", 1)
        out = self.script("""
            handle = modelhost.connect(runtime).acquire("planner", device="auto")
            print(handle.device_reason)
            assert handle.gpu == "" and handle["layer.0.weight"].device_ptr == 0
            assert bytes(handle["layer.0.weight"].view_bytes())
        """)
        self.assertIn("CUDA", out)
