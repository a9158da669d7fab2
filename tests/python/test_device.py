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
    serve_tensors = case.Case.serve_tensors

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
            exec(sys.argv[2])
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
                for options, expected in (
                        ({"dl_device": (1, 0)}, (1, 0, tensor.data_ptr)),
                        ({"dl_device": (1, 0), "max_version": (1, 0)}, (1, 0, tensor.data_ptr)),
                        ({"stream": 1, "max_version": (1, 0), "dl_device": (2, 0)},
                         (2, 0, tensor.device_ptr))):
                    made = opened(tensor.__dlpack__(**options))[1].tensor
                    assert (made.device_type, made.device_id, made.data) == expected, options
                copy = opened(tensor.__dlpack__(dl_device=(1, 0), copy=True))[1].tensor
                assert copy.device_type == 1 and copy.data != tensor.data_ptr
                for options in ({"copy": True}, {"copy": True, "dl_device": (2, 0)}, {"dl_device": (2, 1)}):
                    try:
                        tensor.__dlpack__(**options)
                    except BufferError:
                        continue
                    raise AssertionError(f"{options}: that is not where it is")
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
        """, uuid, CAPSULES, env=self.fake(**self.gpu_env))

    def test_a_tensor_without_bytes_is_on_the_device_of_its_version(self):
        self.serve_tensors("planner", 1, {"w": ("F32", [4, 4], case.pattern("F32", [4, 4])),
                                          "empty": ("F32", [0, 3], b"")})
        self.script("""
            exec(sys.argv[1])
            client = modelhost.connect(runtime)
            empty = client.acquire("planner", device="cuda")["empty"]
            assert empty.__dlpack_device__() == (2, 0)
            assert empty.__cuda_array_interface__["data"] == (0, True)
            assert empty.__cuda_array_interface__["shape"] == (0, 3)
            made = opened(empty.__dlpack__(dl_device=(2, 0)))[1].tensor
            assert (made.device_type, made.shape[:2]) == (2, [0, 3])
            plain = client.acquire("planner")["empty"]
            assert plain.__dlpack_device__() == (1, 0)
            assert not hasattr(plain, "__cuda_array_interface__")
        """, CAPSULES, env=self.fake(**self.gpu_env))

    def test_a_newer_version_is_put_at_the_same_addresses_when_asked(self):
        self.serve("planner", 1)
        self.publish("planner", 2)
        out = self.script("""
            import select
            client = modelhost.connect(runtime)
            live = client.follow("planner", device="cuda", same_addresses=True)
            first = live.current
            pointer = first["layer.0.weight"].device_ptr
            assert pointer and live.remap() is first
            print("ready", flush=True)
            sys.stdin.readline()
            while live.remap() is first:
                select.select([client], [], [], 1)
                client.clear_events()
            second = live.current
            assert live.adopt() is second and second.version == 2
            assert second["layer.0.weight"].device_ptr == pointer
            assert first["layer.0.weight"].device_ptr == 0
            assert bytes(first["layer.0.weight"]) != bytes(second["layer.0.weight"])
            live.close()
            for refused in (live.remap, client.follow("planner", device="cuda").remap):
                try:
                    refused()
                except modelhost.FailedPrecondition as error:
                    print(error)
        """, env=self.fake(**self.gpu_env), when={"ready": lambda: self.ctl(
            "swap", "planner", "--version", 2)})
        self.assertIn("closed", out)
        self.assertIn("SAME_ADDRESSES", out)

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
