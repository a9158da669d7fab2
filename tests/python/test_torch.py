"""torch tensors and modules on shared weights."""
import pathlib
import sys
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import case  # noqa: E402
import harness  # noqa: E402
from case import need  # noqa: E402

NAMES = {"F32": "float32", "F64": "float64", "F16": "float16", "BF16": "bfloat16", "I8": "int8",
         "U8": "uint8", "I16": "int16", "I32": "int32", "I64": "int64", "BOOL": "bool",
         "C64": "complex64"}


class Torch(case.Case):
    def setUp(self):
        self.torch = need("torch")
        super().setUp()

    def serve_module(self, module, version=1, model="net", names=None, drop=()):
        """Publishes what `module.state_dict()` has, by safetensors names."""
        of = {getattr(self.torch, name): dtype for dtype, name in NAMES.items()}
        tensors = {}
        for name, value in module.state_dict().items():
            if name not in drop:
                flat = value.contiguous().reshape(-1)
                data = bytes(flat.view(self.torch.uint8).numpy()) if flat.numel() else b""
                tensors[(names or {}).get(name, name)] = (of[value.dtype], list(value.shape), data)
        self.serve_tensors(model, version, tensors)
        return self.connect().acquire(f"{model}@{version}")

    @harness.smoke
    def test_a_state_dict_is_on_the_shared_memory(self):
        tensors = {name: row for name, row in case.every_type().items()
                   if row[0] in NAMES}
        self.serve_tensors("planner", 1, tensors)
        handle = self.connect().acquire("planner")
        made = handle.torch()
        self.assertEqual(list(made), sorted(tensors))
        for name, (dtype, shape, data) in tensors.items():
            with self.subTest(name):
                for tensor in (made[name], handle[name].torch()):
                    self.assertEqual(tensor.dtype, getattr(self.torch, NAMES[dtype]))
                    self.assertEqual(list(tensor.shape), shape)
                    self.assertFalse(tensor.requires_grad)
                    if data:
                        self.assertEqual(tensor.data_ptr(), handle[name].data_ptr)
                        self.assertEqual(bytes(tensor.reshape(-1).view(self.torch.uint8).numpy()), data)
                if dtype != "BOOL":
                    other = self.torch.from_dlpack(handle[name])
                    self.assertEqual(other.dtype, made[name].dtype)
        handle.close()
        self.assertEqual(self.leases(), 1)
        last = made["of.F32"]
        del made, tensor, other
        self.assertEqual(last.sum().item(), last.clone().sum().item())
        self.assertEqual(self.leases(), 1)
        del last
        self.wait_leases(0)

    def test_types_that_torch_lacks_are_refused_by_name(self):
        self.serve_tensors("planner", 1, case.every_type())
        handle = self.connect().acquire("planner")
        for dtype in ("U16", "F8_E4M3"):
            if hasattr(self.torch, "uint16"):
                self.skipTest("this torch has these types")
            for call in (handle[f"of.{dtype}"].torch, handle.torch):
                with self.assertRaisesRegex(TypeError, r"tensor 'of\.\w+': torch .* no dtype.*view_bytes"):
                    call()
            with self.assertRaisesRegex(TypeError, rf"of\.{dtype}"):
                handle[f"of.{dtype}"].torch()
        there = handle.torch(strict=False)
        self.assertEqual(set(handle) - set(there),
                         {"of.U16", "of.U32", "of.U64", "of.F8_E4M3", "of.F8_E5M2"})
        self.assertEqual(there["of.F32"].data_ptr(), handle["of.F32"].data_ptr)

    def test_a_type_that_torch_lacks_is_no_matter_where_the_module_does_not_use_it(self):
        import modelhost.torch
        if hasattr(self.torch, "uint16"):
            self.skipTest("this torch has these types")
        self.serve_tensors("planner", 1, case.every_type())
        handle = self.connect().acquire("planner")
        module = self.torch.nn.Module()
        module.of = self.torch.nn.Module()
        module.of.F32 = self.torch.nn.Parameter(self.torch.empty(4, 6))
        missing, unexpected = modelhost.torch.load_into(module, handle, strict=False)
        self.assertEqual((missing, len(unexpected)), ([], len(handle) - 1))
        self.assertEqual(module.of.F32.data_ptr(), handle["of.F32"].data_ptr)
        module.of.U16 = self.torch.nn.Parameter(self.torch.empty(4, 6))
        with self.assertRaisesRegex(self.modelhost.InvalidArgument, r"of\.U16: .*no dtype for U16"):
            modelhost.torch.load_into(module, handle, strict=False)

    def test_what_is_no_module_or_no_handle_is_said(self):
        net = self.torch.nn.Linear(2, 2)
        handle = self.serve_module(net)
        for arguments in ((handle, net), (net, "net"), (net, {})):
            with self.assertRaisesRegex(TypeError, r"load_into\(module, handle\)"):
                self.modelhost.torch.load_into(*arguments)

    def test_a_copy_is_private_and_writable(self):
        self.serve_tensors("planner", 1, {"w": ("F32", [2], case.pattern("F32", [2]))})
        handle = self.connect().acquire("planner")
        for copy in (handle.torch(copy=True)["w"], handle["w"].torch(copy=True)):
            copy.zero_()
        self.assertEqual(bytes(handle["w"]), case.pattern("F32", [2]))

    def test_a_write_without_a_copy_is_the_documented_fault(self):
        self.serve_tensors("planner", 1, {"w": ("F32", [2], case.pattern("F32", [2]))})
        import signal
        self.script("""
            import torch
            handle = modelhost.connect(runtime).acquire("planner")
            handle["w"].torch().zero_()
        """, expect=-signal.SIGSEGV)

    def test_a_component_has_to_be_named_where_there_are_several(self):
        folder = self.folder / "two"
        for name in ("text", "vision"):
            case.write_tensors(folder / name / "model.safetensors", {
                "shared": ("U8", [2], name[:2].encode()), f"only.{name}": ("U8", [1], b"x")})
        self.serve("pair", 1, folder=folder)
        handle = self.connect().acquire("pair")
        first, second = sorted(handle.components)
        with self.assertRaisesRegex(self.modelhost.InvalidArgument, f"{first}, {second}"):
            handle.torch()
        with self.assertRaisesRegex(self.modelhost.NotFound, f"'x'.*{first}, {second}"):
            handle.torch("x")
        self.assertEqual(list(handle.torch(first)), ["only.text", "shared"])
        self.assertEqual(bytes(handle.torch(second)["shared"].numpy()), b"vi")

    # --- load_into

    def net(self, device="cpu"):
        nn = self.torch.nn
        self.torch.manual_seed(7)
        return nn.Sequential(nn.Linear(8, 16, device=device), nn.BatchNorm1d(16, device=device),
                             nn.Linear(16, 4, device=device)).eval()

    def test_a_module_uses_the_shared_memory_and_computes_the_same(self):
        import modelhost.torch
        original = self.net()
        handle = self.serve_module(original)
        module = self.net(device="meta")
        result = modelhost.torch.load_into(module, handle)
        self.assertEqual(result, ([], []))
        for name, value in module.named_parameters():
            self.assertEqual(value.data_ptr(), handle[name].data_ptr, name)
        for name, value in module.named_buffers():  # Which modules write to.
            self.assertNotEqual(value.data_ptr(), handle[name].data_ptr, name)
        for parameter in module.parameters():
            self.assertIsInstance(parameter, self.torch.nn.Parameter)
            self.assertFalse(parameter.requires_grad)
        x = self.torch.randn(3, 8)
        with self.torch.no_grad():
            self.assertTrue(self.torch.equal(module(x), original(x)))
        handle.close()
        with self.torch.no_grad():
            self.assertTrue(self.torch.equal(module(x), original(x)))
        self.assertEqual(self.leases(), 1)
        del module, handle, parameter, value
        self.wait_leases(0)

    def test_a_module_in_training_mode_may_be_run(self):
        self.serve_module(self.net())
        self.script("""
            import torch, modelhost.torch
            nn = torch.nn
            handle = modelhost.connect(runtime).acquire("net")
            module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
            modelhost.torch.load_into(module, handle)
            assert module.training
            module(torch.randn(3, 8))
            assert module[1].num_batches_tracked == 1
            assert handle["1.num_batches_tracked"].numpy() == 0
        """)

    def test_buffers_may_be_shared_too(self):
        import modelhost.torch
        handle = self.serve_module(self.net())
        module = self.net(device="meta")
        modelhost.torch.load_into(module, handle, share_buffers=True)
        for name, value in module.state_dict().items():
            self.assertEqual(value.data_ptr(), handle[name].data_ptr, name)

    def test_a_buffer_that_nothing_fills_is_an_error_that_names_it(self):
        import modelhost.torch
        torch = self.torch

        class Rotary(torch.nn.Module):
            def __init__(self, device):
                super().__init__()
                self.scale = torch.nn.Parameter(torch.ones(4, device=device))
                self.register_buffer("inv_freq", torch.ones(4, device=device), persistent=False)

        handle = self.serve_module(torch.nn.ModuleDict({"rope": Rotary("cpu")}))
        module = torch.nn.ModuleDict({"rope": Rotary("meta")})
        with self.assertRaisesRegex(self.modelhost.InvalidArgument, r"rope\.inv_freq: .*meta.*fill it"):
            modelhost.torch.load_into(module, handle)
        self.assertTrue(module["rope"].scale.is_meta)
        self.assertEqual(modelhost.torch.load_into(module, handle, strict=False), (["rope.inv_freq"], []))
        module["rope"].inv_freq = torch.ones(4)
        self.assertEqual(modelhost.torch.load_into(module, handle), ([], []))
        self.assertEqual(module["rope"].scale.data_ptr(), handle["rope.scale"].data_ptr)

    def test_a_parameter_that_is_a_buffer_too_stays_both(self):
        import modelhost.torch
        nn = self.torch.nn

        def both():
            module = nn.Module()
            module.w = nn.Parameter(self.torch.arange(4.0))
            module.inner = nn.Module()
            module.inner.register_buffer("view", module.w)
            return module

        original = both()
        for version, drop in enumerate([(), ("w",), ("inner.view",)], 1):
            handle = self.serve_module(original, version, drop=drop)
            module = both()
            module.w.data.zero_()
            self.assertEqual(modelhost.torch.load_into(module, handle), ([], []))
            self.assertTrue(self.torch.equal(module.w, original.w))
            self.assertIs(module.inner.view, module.w)
            self.assertEqual(list(dict(module.named_parameters())), ["w"])
            self.assertEqual(list(dict(module.named_buffers())), ["inner.view"])

    def test_a_module_that_refuses_a_parameter_is_as_it_was(self):
        import modelhost.torch
        nn = self.torch.nn

        class Picky(nn.Linear):
            armed = False

            def __setattr__(self, name, value):
                if name == "bias" and self.armed:
                    raise RuntimeError("not my bias")
                super().__setattr__(name, value)

        handle = self.serve_module(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        module = nn.Sequential(nn.Linear(2, 2), Picky(2, 2))
        module[1].armed = True
        before = dict(module.named_parameters())
        with self.assertRaisesRegex(RuntimeError, "not my bias"):
            modelhost.torch.load_into(module, handle)
        after = dict(module.named_parameters())
        self.assertEqual({name: id(value) for name, value in after.items()},
                         {name: id(value) for name, value in before.items()})

    def test_copies_that_do_not_fit_in_memory_change_nothing(self):
        self.serve_tensors("big", 1, {f"{i}.w": ("U8", [24 << 20], bytes(24 << 20)) for i in range(4)})
        self.script("""
            import resource, torch, modelhost.torch
            handle = modelhost.connect(runtime).acquire("big")
            module = torch.nn.Module()
            for i in range(4):
                module.add_module(str(i), torch.nn.Module())
                empty = torch.empty(24 << 20, dtype=torch.uint8, device="meta")
                module._modules[str(i)].w = torch.nn.Parameter(empty, requires_grad=False)
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (60 << 20),) * 2)
            try:
                modelhost.torch.load_into(module, handle, copy=True)
            except RuntimeError as error:
                assert "allocate" in str(error), error
            else:
                raise AssertionError("there was no room")
            assert all(value.is_meta for value in module.parameters())
        """)

    def test_attributes_of_parameters_are_carried_over(self):
        import modelhost.torch
        handle = self.serve_module(self.net())
        module = self.net()
        module[0].weight.sharded = "no"
        modelhost.torch.load_into(module, handle)
        self.assertEqual(module[0].weight.sharded, "no")

    def test_a_recurrent_module_uses_what_was_loaded(self):
        import modelhost.torch
        self.torch.manual_seed(3)
        original = self.torch.nn.LSTM(4, 5).eval()
        handle = self.serve_module(original)
        module = self.torch.nn.LSTM(4, 5).eval()
        modelhost.torch.load_into(module, handle)
        x = self.torch.randn(6, 1, 4)
        with self.torch.no_grad():
            self.assertTrue(self.torch.equal(module(x)[0], original(x)[0]))

    def test_misfits_are_refused_by_name_and_change_nothing(self):
        import modelhost.torch
        nn = self.torch.nn
        handle = self.serve_module(self.net())
        for what, module, expected in [
                ("a shape", nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)),
                 [r"2\.weight: shape \[4, 16\] in the model, \[5, 16\] in the module", r"2\.bias: shape"]),
                ("a dtype", self.net().to(self.torch.bfloat16),
                 [r"0\.weight: torch\.float32 in the model, torch\.bfloat16 in the module"]),
                ("a missing name", nn.Sequential(*self.net(), nn.Linear(4, 2)),
                 [r"3\.weight: not in the model"]),
                ("one too many", nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16)),
                 [r"2\.weight: not in the module"])]:
            with self.subTest(what):
                before = {name: value.data_ptr() for name, value in module.state_dict().items()}
                with self.assertRaises(self.modelhost.InvalidArgument) as raised:
                    modelhost.torch.load_into(module, handle)
                for pattern in [r"net@1 does not fit Sequential", *expected]:
                    self.assertRegex(str(raised.exception), pattern)
                self.assertEqual(
                    {name: value.data_ptr() for name, value in module.state_dict().items()}, before)
        lazy = nn.Sequential(nn.LazyLinear(16), nn.BatchNorm1d(16), nn.Linear(16, 4))
        with self.assertRaisesRegex(self.modelhost.InvalidArgument, r"0\.weight.*lazy"):
            modelhost.torch.load_into(lazy, handle)

    def test_eight_processes_have_one_copy_of_the_weights(self):
        size = 16 << 20
        self.serve_tensors("planner", 1, {f"w{i}": ("U8", [size // 8], bytes([i]) * (size // 8)) for i in range(8)})
        code = """
            import modelhost.torch
            client = modelhost.connect(runtime)
            state = client.acquire("planner").torch()
            assert sum(int(tensor.view(-1)[::512].sum()) for tensor in state.values()) > 0  # Every page.
            print("there", flush=True)
            input()
        """
        runs = []
        there, counted = threading.Barrier(9), threading.Event()
        for _ in range(8):
            def hold():
                there.wait(harness.DEADLINE_S)
                counted.wait(harness.DEADLINE_S)
            runs.append(threading.Thread(target=self.script, args=(code,), kwargs={"when": {"there": hold}}))
        for run in runs:
            run.start()
        try:
            there.wait(4 * harness.DEADLINE_S)
            pids = [row["pid"] for row in self.json("clients")["items"] if row["leases"]]
            self.assertEqual(len(pids), 8)
            total = 0
            for pid in pids:
                mine, inside = 0, False
                for line in pathlib.Path(f"/proc/{pid}/smaps").read_text().splitlines():
                    name = line.split()[0]
                    if not name.endswith(":"):
                        inside = "model.safetensors" in line
                    elif inside and name == "Pss:":
                        mine += int(line.split()[1]) * 1024
                self.assertGreater(mine, 0)
                total += mine
            self.assertLess(total, 1.05 * size)
        finally:
            counted.set()
            for run in runs:
                run.join()

    def test_names_that_a_prefix_would_make_fit_are_said(self):
        import modelhost.torch
        nn = self.torch.nn
        inner = self.serve_module(self.net(), 1)
        whole = self.serve_module(nn.ModuleDict({"model": nn.ModuleDict({"net": self.net()})}), 2)
        other = self.serve_module(self.net(), 3, names={"2.bias": "bias"})  # The rest fits.
        for module, handle, expected in [
                (nn.ModuleDict({"model": nn.ModuleDict({"net": self.net()})}), inner,
                 r"\(the model's names are those of the submodule model\.net: load into that\)$"),
                (self.net(), whole, r"\(the model has all of these after 'model\.net\.': load into a module that has "
                                    r"this one as its model\.net\)$"),
                (self.net(), other, r"bias: not in the module$")]:
            with self.assertRaisesRegex(self.modelhost.InvalidArgument, expected):
                modelhost.torch.load_into(module, handle)

    def test_what_does_not_fit_by_name_is_returned_when_not_strict(self):
        import modelhost.torch
        nn = self.torch.nn
        handle = self.serve_module(self.net())
        module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Identity(), nn.Linear(16, 4))
        kept = module[3].weight.clone()
        result = modelhost.torch.load_into(module, handle, strict=False)
        self.assertEqual(sorted(result.missing_keys), ["3.bias", "3.weight"])
        self.assertEqual(sorted(result.unexpected_keys), ["2.bias", "2.weight"])
        self.assertTrue(self.torch.equal(module[3].weight, kept))
        self.assertEqual(module[0].weight.data_ptr(), handle["0.weight"].data_ptr)

    def tied(self):
        nn = self.torch.nn
        self.torch.manual_seed(5)
        net = nn.ModuleDict({"embed": nn.Embedding(10, 6), "head": nn.Linear(6, 10, bias=False)})
        net["head"].weight = net["embed"].weight
        return net

    def test_tied_weights_stay_tied_whether_the_model_has_one_name_or_both(self):
        import modelhost.torch
        original = self.tied()
        for version, drop in enumerate([("head.weight",), ("embed.weight",), ()], 1):
            with self.subTest(version):
                handle = self.serve_module(original, version, drop=drop)
                module = self.tied()
                module["embed"].weight.data.zero_()
                self.assertEqual(modelhost.torch.load_into(module, handle), ([], []))
                self.assertIs(module["head"].weight, module["embed"].weight)
                self.assertTrue(self.torch.equal(module["head"].weight, original["head"].weight))

    def test_tied_weights_that_differ_in_the_model_are_refused(self):
        import modelhost.torch
        other = self.tied()
        other["head"].weight = self.torch.nn.Parameter(other["embed"].weight + 1)
        handle = self.serve_module(other)
        with self.assertRaisesRegex(self.modelhost.InvalidArgument, "head.weight: tied to embed.weight"):
            modelhost.torch.load_into(self.tied(), handle)

    def test_a_module_that_is_used_twice_is_loaded_once(self):
        import modelhost.torch
        nn = self.torch.nn
        shared = nn.Linear(3, 3)
        net = nn.ModuleDict({"a": shared, "b": shared})
        handle = self.serve_module(net)
        again = nn.Linear(3, 3)
        module = nn.ModuleDict({"a": again, "b": again})
        modelhost.torch.load_into(module, handle)
        self.assertTrue(self.torch.equal(again.weight, shared.weight))

    def test_training_needs_copies_and_then_works(self):
        import modelhost.torch
        handle = self.serve_module(self.net())
        module = self.net()
        with self.assertRaisesRegex(self.modelhost.InvalidArgument, "copy=True"):
            modelhost.torch.load_into(module, handle, requires_grad=True)
        modelhost.torch.load_into(module, handle, copy=True, requires_grad=True)
        optimiser = self.torch.optim.SGD(module.parameters(), 0.1)
        before = bytes(handle["0.weight"])
        module(self.torch.randn(3, 8)).sum().backward()
        optimiser.step()
        self.assertEqual(bytes(handle["0.weight"]), before)
        self.assertNotEqual(bytes(module[0].weight.detach().numpy()), before)

    def test_views_with_strides_keep_them(self):
        torch = self.torch
        folder = self.folder / "pt"
        folder.mkdir()
        base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
        wide = torch.arange(6, dtype=torch.float64).to(torch.complex128).reshape(2, 3).t()
        torch.save({"w": base.t(), "v": base[:, ::2], "c": wide}, folder / "model.pt")
        self.serve("strided", 1, folder=folder)
        handle = self.connect().acquire("strided")
        made = handle.torch()
        bits = handle["c"].numpy(raw=True)  # No integers have 16 bytes.
        self.assertEqual((bits.dtype.str, bits.shape), ("|u1", (3, 2, 16)))
        self.assertEqual(bits.tobytes(), wide.contiguous().numpy().tobytes())
        self.assertTrue(torch.equal(made["c"], wide))
        for name, expected in (("w", base.t()), ("v", base[:, ::2])):
            with self.subTest(name):
                self.assertFalse(handle[name].contiguous)
                self.assertTrue(torch.equal(made[name], expected))
                self.assertEqual(made[name].stride(), expected.stride())
                self.assertTrue((handle[name].numpy() == expected.numpy()).all())
                self.assertTrue((handle[name].numpy(raw=True).view("float32") == expected.numpy()).all())
                self.assertEqual(bytes(memoryview(handle[name])), expected.numpy().tobytes())
                with self.assertRaises(BufferError):
                    hash_of(handle[name])

    def test_the_interpreter_may_end_with_live_tensors(self):
        self.serve_tensors("planner", 1, {"w": ("F32", [4], case.pattern("F32", [4]))})
        for ending in ("keep = made(); keep.append(keep)", "torch.keep = made()"):
            with self.subTest(ending):
                self.script(f"""
                    import torch, modelhost.torch
                    def made():
                        handle = modelhost.connect(runtime).acquire("planner")
                        module = torch.nn.Module()
                        module.w = torch.nn.Parameter(torch.empty(4))
                        modelhost.torch.load_into(module, handle)
                        return [handle, handle.torch(), module, handle["w"].torch()]
                    {ending}
                """)
        self.wait_leases(0)


def hash_of(tensor):
    import hashlib
    return hashlib.sha256(tensor)
