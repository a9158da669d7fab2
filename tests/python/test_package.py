"""The Python package: connecting, tensors, files, errors."""
import errno
import json
import os
import pathlib
import struct
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import case  # noqa: E402
import harness  # noqa: E402
import models  # noqa: E402
from case import need, wait_for  # noqa: E402

NUMPY_NAMES = {"F32": "float32", "F64": "float64", "F16": "float16", "I8": "int8", "U8": "uint8",
               "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32", "I64": "int64",
               "U64": "uint64", "BOOL": "bool", "C64": "complex64"}


class Package(case.Case):
    def serve_every_type(self):
        self.tensors = case.every_type()
        self.serve_tensors("planner", 1, self.tensors, metadata={"format": "pt", "note": "as is"},
                           files={"tokenizer.json": b'{"of": 1}', "empty.txt": b""})
        return self.connect().acquire("planner")

    @harness.smoke
    def test_a_handle_is_a_mapping_of_names_to_tensors(self):
        handle = self.serve_every_type()
        self.assertEqual(list(handle), sorted(self.tensors))
        self.assertEqual(list(handle.keys()), sorted(self.tensors))
        self.assertEqual(len(handle), len(self.tensors))
        self.assertEqual([name for name, _ in handle.items()], sorted(self.tensors))
        self.assertEqual([tensor.name for tensor in handle.values()], sorted(self.tensors))
        self.assertIn("of.F32", handle)
        for absent in ("of.F33", "", 7, None, "model/of.F33", "of.F32\0", "\ud800", b"of.F32"):
            self.assertNotIn(absent, handle)
        self.assertIsNone(handle.get("no such"))
        self.assertEqual(handle.get("no such", 7), 7)
        self.assertEqual(handle.get("of.F32"), handle["of.F32"])
        for name, tensor in list(handle.items()):
            self.assertIn((name, tensor), handle.items())
            self.assertIn(tensor, handle.values())
        for absent in (("of.F32", handle["of.F64"]), ("no such", tensor), ("of.F32",), "of.F32", 7):
            self.assertNotIn(absent, handle.items())
        other = self.connect().acquire("planner")["of.F32"]
        self.assertNotEqual(handle["of.F32"], other)
        self.assertNotIn(other, handle.values())
        self.assertEqual(len({handle["of.F32"], handle["of.F32"], handle["of.F64"], other}), 3)
        self.assertEqual(handle.model, "planner")
        self.assertEqual((handle.label, handle.version, handle.format), ("stable", 1, "safetensors"))
        self.assertEqual(len(handle.digest), 64)
        self.assertGreater(handle.generation, 0)
        self.assertFalse(handle.superseded)
        self.assertIn("planner@1", repr(handle))
        self.assertNotEqual(handle, dict(handle))
        self.assertEqual(len({handle, handle}), 1)

    def test_tensors_say_what_they_are(self):
        handle = self.serve_every_type()
        for name, (dtype, shape, data) in self.tensors.items():
            with self.subTest(name):
                tensor = handle[name]
                self.assertEqual(tensor.name, name)
                self.assertEqual(tensor.dtype, dtype)
                self.assertEqual(tensor.shape, tuple(shape))
                self.assertEqual(tensor.nbytes, len(data))
                self.assertEqual(tensor.itemsize, case.SIZES[dtype])
                self.assertEqual(tensor.ndim, len(shape))
                self.assertEqual(tensor.file, "model.safetensors")
                self.assertTrue(tensor.contiguous and tensor.mappable)
                self.assertEqual(tensor.reason, "")
                self.assertEqual(bytes(tensor.view_bytes()), data)
                self.assertEqual(tensor.strides, (shape[1], 1) if shape else ())
                self.assertIn(dtype, repr(tensor))

    def test_numpy_has_the_same_values_on_the_same_memory(self):
        numpy = need("numpy")
        handle = self.serve_every_type()
        for name, (dtype, shape, data) in self.tensors.items():
            if dtype not in NUMPY_NAMES:
                continue
            with self.subTest(name):
                expected = numpy.frombuffer(data, NUMPY_NAMES[dtype]).reshape(shape)
                for made in (handle[name].numpy(), numpy.asarray(handle[name]),
                             numpy.array(handle[name], copy=False), numpy.asarray(handle[name].view_bytes())
                             .view(NUMPY_NAMES[dtype]).reshape(shape)):
                    self.assertEqual(made.dtype, expected.dtype)
                    self.assertEqual(made.shape, expected.shape)
                    self.assertEqual(made.tobytes(), data)
                    self.assertFalse(made.flags.writeable)
                    if data:
                        self.assertEqual(made.ctypes.data, handle[name].data_ptr)
                interface = handle[name].__array_interface__
                self.assertEqual(numpy.dtype(interface["typestr"]), expected.dtype)
                self.assertTrue(interface["data"][1])
                by_dlpack = dtype != "BOOL" and numpy.from_dlpack(handle[name])
                if by_dlpack is not False:
                    self.assertEqual(by_dlpack.tobytes(), data)
                self.assertEqual(numpy.asarray(handle[name], dtype="complex128").dtype, "complex128")

    def test_writing_into_a_view_is_an_error(self):
        numpy = need("numpy")
        handle = self.serve_every_type()
        tensor = handle["of.F32"]
        for array in (tensor.numpy(), numpy.asarray(tensor), numpy.from_dlpack(tensor),
                      tensor.numpy(raw=True)):
            with self.assertRaises(ValueError):
                array[0] = 1
            with self.assertRaises(ValueError):
                array.flags.writeable = True
        with self.assertRaises(TypeError):
            memoryview(tensor)[0, 0] = 1.0
        with self.assertRaises(TypeError):
            tensor.view_bytes()[0] = 1
        with self.assertRaises(TypeError):
            struct.pack_into("<f", tensor, 0, 1.0)
        with self.assertRaises(AttributeError):
            tensor.shape = (1,)
        copy = tensor.numpy().copy()
        copy[0] = 1
        self.assertEqual(bytes(tensor.view_bytes()), self.tensors["of.F32"][2])

    def test_types_that_numpy_lacks_are_refused_by_name_and_their_bits_are_there(self):
        numpy = need("numpy")
        handle = self.serve_every_type()
        for dtype, bits in (("BF16", "uint16"), ("F8_E4M3", "uint8"), ("F8_E5M2", "uint8")):
            with self.subTest(dtype):
                tensor = handle[f"of.{dtype}"]
                data = self.tensors[f"of.{dtype}"][2]
                for refused in (tensor.numpy, lambda: numpy.asarray(tensor),
                                lambda: numpy.array(tensor)):
                    with self.assertRaisesRegex(TypeError, rf"of\.{dtype}.*raw=True.*view_bytes"):
                        refused()
                with self.assertRaises(BufferError):
                    memoryview(tensor)
                self.assertFalse(hasattr(tensor, "__array_interface__"))
                raw = tensor.numpy(raw=True)
                self.assertEqual((raw.dtype, raw.shape), (numpy.dtype(bits), (4, 6)))
                self.assertEqual(raw.tobytes(), data)

    def test_block_types_show_rows_of_bytes(self):
        need("numpy")
        folder = self.folder / "gguf"
        folder.mkdir()
        # One Q8_0 tensor of 3 rows of 64: 2 blocks of 34 bytes each.
        data = bytes(range(204))
        head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1)
        head += models._gguf_string("general.architecture") + struct.pack("<I", 8)
        head += models._gguf_string("llama")
        head += models._gguf_string("blk.0.weight") + struct.pack("<IQQIQ", 2, 64, 3, 8, 0)
        head += b"\0" * (-len(head) % 32)
        (folder / "model.gguf").write_bytes(head + data + b"\0" * (-len(data) % 32))
        self.serve("blocks", 1, folder=folder)
        tensor = self.connect().acquire("blocks")["blk.0.weight"]
        self.assertEqual((tensor.dtype, tensor.shape, tensor.block, tensor.itemsize),
                         ("Q8_0", (3, 64), (32, 34), 0))
        self.assertEqual(bytes(tensor.view_bytes()), data)
        self.assertEqual(tensor.numpy(raw=True).shape, (3, 68))
        self.assertEqual(tensor.numpy(raw=True).tobytes(), data)
        with self.assertRaisesRegex(TypeError, "Q8_0"):
            tensor.numpy()
        with self.assertRaisesRegex(BufferError, "Q8_0"):
            tensor.__dlpack__()

    def test_files_are_bytes_and_a_path(self):
        handle = self.serve_every_type()
        self.assertEqual(handle.files, ("empty.txt", "model.safetensors", "tokenizer.json"))
        file = handle.file("tokenizer.json")
        self.assertEqual(json.loads(bytes(file)), {"of": 1})
        self.assertEqual(bytes(file.data), b'{"of": 1}')
        self.assertTrue(memoryview(file).readonly)
        self.assertEqual((file.name, file.role, file.nbytes, len(file)),
                         ("tokenizer.json", "sidecar", 9, 9))
        self.assertEqual(len(file.sha256), 64)
        for path in (file, file.path):
            with open(path, "rb") as opened:
                self.assertEqual(opened.read(), b'{"of": 1}')
        self.assertEqual(bytes(handle.file("empty.txt")), b"")
        with self.assertRaisesRegex(self.modelhost.NotFound, "tokenizer.json"):
            handle.file("tokeniser.json")
        self.assertEqual(handle.metadata, {"format": "pt", "note": "as is"})
        self.assertEqual(list(handle.components.values()), ["safetensors"])

    def test_names_of_two_components_are_told_apart(self):
        folder = self.folder / "two"
        for name in ("text", "vision"):
            case.write_tensors(folder / name / "model.safetensors", {
                "shared": ("U8", [2], name[:2].encode()), f"only.{name}": ("U8", [1], b"x")})
        self.serve("pair", 1, folder=folder)
        handle = self.connect().acquire("pair")
        first, second = sorted(handle.components)
        self.assertEqual(list(handle), ["only.text", "only.vision", f"{first}/shared", f"{second}/shared"])
        for key, tensor in handle.items():
            self.assertEqual(handle[key].data_ptr, tensor.data_ptr)
            self.assertIn(key, handle)
        self.assertNotIn("shared", handle)
        self.assertIsNone(handle.get("shared"))
        self.assertNotIn(("shared", handle[f"{first}/shared"]), handle.items())
        for item in handle.items():
            self.assertIn(item, handle.items())
            self.assertIn(item[1], handle.values())
        with self.assertRaisesRegex(self.modelhost.InvalidArgument, f"{first}/shared"):
            handle["shared"]
        self.assertEqual(bytes(handle[f"{second}/shared"]), b"vi")

    def test_wrong_names_are_errors_with_near_ones(self):
        handle = self.serve_every_type()
        client = self.connect()
        for call, near in ((lambda: handle["of.F33"], "of.F32"),
                           (lambda: client.acquire("planer"), "planner"),
                           (lambda: client.acquire("planner@2"), "planner"),
                           (lambda: handle["of.F32\0x"], "NUL"),
                           (lambda: handle["of.F3\ud800"], "of.F3"),
                           (lambda: handle.file("tokenizer.jso\ud800"), "tokenizer"),
                           (lambda: handle.file("config.json\0"), "NUL")):
            with self.assertRaises(KeyError) as raised:
                call()
            self.assertIsInstance(raised.exception, self.modelhost.NotFound)
            self.assertEqual(raised.exception.status, "NOT_FOUND")
            self.assertIn(near, str(raised.exception))
        for ref in ("", "planner@", "planner@x", "a b", "planner@-1", "planner\0x"):
            with self.subTest(ref), self.assertRaises(self.modelhost.InvalidArgument):
                client.resolve(ref)
            with self.subTest(ref), self.assertRaises(self.modelhost.InvalidArgument):
                client.acquire(ref)
        for call in (lambda: self.modelhost.connect(f"{self.daemon.runtime}\0junk"),
                     lambda: client.acquire("planner", device="GPU\0")):
            with self.assertRaisesRegex(self.modelhost.InvalidArgument, "NUL"):
                call()
        with self.assertRaises(TypeError):
            client.acquire(7)
        for call in (client.acquire_set, client.follow_set):
            with self.assertRaisesRegex(TypeError, r"\['planner'\]"):
                call("planner")
        for timeout in (0, -1, float("nan")):
            with self.assertRaises(ValueError):
                client.acquire("planner", timeout=timeout)

    def test_objects_of_the_extension_are_made_by_it_alone(self):
        from modelhost import _native
        handle = self.serve_every_type()
        for kind in (self.modelhost.Tensor, self.modelhost.File, _native.Bytes, _native.Handle,
                     _native.Live, _native.LiveSet, _native.Client):
            for make in (kind, kind.__new__, object.__new__, kind.__mro__[-2].__new__):
                with self.subTest(f"{kind.__name__} {make}"), self.assertRaises(TypeError):
                    made = make() if make is kind else make(kind)
                    memoryview(made)
        self.assertEqual(bytes(handle["of.U8"]), self.tensors["of.U8"][2])

    def test_bytes_of_a_tensor_and_a_file_are_copies(self):
        handle = self.serve_every_type()
        self.assertEqual(bytes(handle["of.F32"]), self.tensors["of.F32"][2])
        self.assertEqual(handle["of.F32"].__bytes__(), self.tensors["of.F32"][2])
        self.assertEqual(handle.file("tokenizer.json").__bytes__(), b'{"of": 1}')
        with self.assertRaisesRegex(BufferError, "view_bytes"):
            bytes(handle["of.BF16"])

    def test_a_miss_of_get_does_not_look_for_near_names(self):
        names = {f"layers.{i}.attention.weight": ("U8", [1], b"x") for i in range(2000)}
        self.serve_tensors("many", 1, names)
        handle = self.connect().acquire("many")

        def cost(call, times):
            begin = time.process_time()
            for _ in range(times):
                call()
            return (time.process_time() - begin) / times

        def miss():
            try:
                handle["layers.1.attention.weigth"]
            except KeyError:
                pass

        self.assertLess(cost(lambda: handle.get("layers.1.attention.weigth"), 200), cost(miss, 20) / 4)

    def test_a_device_that_is_not_there_is_an_error(self):
        self.serve_every_type()
        client = self.connect()
        self.assertEqual(client.acquire("planner", device="cpu").version, 1)
        for device in ("cuda", "GPU-00000000-0000-0000-0000-000000000000"):
            with self.subTest(device), self.assertRaises(self.modelhost.Error):
                client.acquire("planner", device=device)
        with self.assertRaisesRegex(self.modelhost.InvalidArgument, "UUID"):
            client.acquire("planner", device="cuda:0")
        tensor = client.acquire("planner")["of.F32"]
        self.assertFalse(hasattr(tensor, "__cuda_array_interface__"))
        self.assertEqual(tensor.__dlpack_device__(), (1, 0))
        self.assertEqual(tensor.device_ptr, 0)

    def test_no_daemon_is_named_by_its_socket(self):
        for expected in (self.modelhost.Unavailable, ConnectionError):
            with self.assertRaisesRegex(expected, "handles.sock") as raised:
                self.modelhost.connect(self.folder / "nowhere", timeout=0.05)
            self.assertEqual(raised.exception.errno, errno.ECONNREFUSED)
            self.assertEqual(raised.exception.strerror, str(raised.exception))
        with self.assertRaises(self.modelhost.Unavailable) as raised:
            self.modelhost.connect(os.fsdecode(b"/nowhere/\xff"), timeout=0.05)
        self.assertIn("\ufffd/handles.sock", str(raised.exception))

    def test_waiting_for_a_version_ends_with_the_timeout(self):
        self.serve_every_type()
        client = self.connect()
        with self.assertRaises(TimeoutError) as raised:
            client.acquire("planner@2", wait=True, timeout=0.2)
        self.assertEqual(raised.exception.errno, errno.ETIMEDOUT)

    def test_a_closed_client_or_handle_says_so(self):
        handle = self.serve_every_type()
        tensor = handle["of.U8"]
        handle.close()
        self.assertTrue(handle.closed)
        for use in (lambda: handle["of.U8"], lambda: len(handle), lambda: list(handle),
                    lambda: handle.version, lambda: handle.file("tokenizer.json"),
                    lambda: handle.superseded, lambda: "of.U8" in handle, lambda: handle.metadata,
                    lambda: handle.torch()):
            with self.assertRaisesRegex(self.modelhost.FailedPrecondition, "planner@1.*closed"):
                use()
        handle.close()
        self.assertIn("closed", repr(handle))
        self.assertEqual(bytes(tensor), self.tensors["of.U8"][2])
        with self.connect() as client:
            other = client.acquire("planner")
        for use in (lambda: client.acquire("planner"), client.state, client.fileno,
                    lambda: client.resolve("planner"), lambda: client.follow("planner"),
                    lambda: client.acquire_set(["planner"]), lambda: client.follow_set(["planner"])):
            with self.assertRaisesRegex(self.modelhost.FailedPrecondition, "closed"):
                use()
        client.close()
        client.clear_events()
        self.assertEqual(bytes(other["of.U8"]), self.tensors["of.U8"][2])
        with self.assertRaises(self.modelhost.FailedPrecondition):
            other.file("tokenizer.json")

    def test_the_lease_ends_with_the_last_view(self):
        handle = self.serve_every_type()
        self.wait_leases(1)
        tensor = handle["of.U8"]
        view = memoryview(tensor)
        del tensor
        handle.close()
        self.assertEqual(self.leases(), 1)
        self.assertEqual(bytes(view), self.tensors["of.U8"][2])
        del view
        self.wait_leases(0)

    def test_a_client_that_is_garbage_keeps_its_leases_while_there_are_views(self):
        self.serve_every_type()
        view = memoryview(self.connect(keep=False).acquire("planner")["of.U8"])
        self.wait_leases(1)
        self.assertEqual(bytes(view), self.tensors["of.U8"][2])
        del view
        self.wait_leases(0)

    def test_a_reader_without_rights_is_refused(self):
        if not harness.AS_ROOT:
            self.skipTest("needs root, to be several users")
        self.serve_every_type()
        with harness.as_peer(harness.STRANGER), self.assertRaises(PermissionError) as raised:
            self.modelhost.connect(self.daemon.runtime, timeout=1).acquire("planner")
        self.assertEqual(raised.exception.status, "PERMISSION_DENIED")
        self.assertEqual(raised.exception.errno, errno.EACCES)

    def test_the_state_of_a_client(self):
        self.serve_every_type()
        client = self.connect()
        handle = client.acquire("planner")
        state = client.state()
        self.assertEqual(state.socket, str(self.daemon.handles_socket))
        self.assertTrue(state.connected)
        self.assertEqual((state.leases, state.reconnects), (1, 0))
        self.assertEqual(client.resolve("planner"), (1, handle.generation))
        self.assertEqual(client.resolve("planner@7"), (7, 0))
        with self.assertRaises(self.modelhost.NotFound):
            client.resolve("planner:nowhere")
        handle.close()
        wait_for("no lease", lambda: client.state().leases == 0)

    def test_a_set_is_acquired_from_one_snapshot_or_not_at_all(self):
        for model in ("a", "b"):
            self.serve(model, 1)
        client = self.connect()
        self.assertEqual([handle.model for handle in client.acquire_set(["a", "b"])], ["a", "b"])
        with self.assertRaises(self.modelhost.NotFound):
            client.acquire_set(["a", "nowhere"])
        with self.assertRaises(self.modelhost.InvalidArgument):
            client.acquire_set([])
