"""DLPack capsules, byte for byte as a consumer in C reads them."""
import ctypes as c
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import case  # noqa: E402
from capsules import IS_COPIED, READ_ONLY, opened, taken_from  # noqa: E402

# (code, bits)
TYPES = {"F32": (2, 32), "F64": (2, 64), "F16": (2, 16), "BF16": (4, 16), "I8": (0, 8), "U8": (1, 8),
         "I16": (0, 16), "U16": (1, 16), "I32": (0, 32), "U32": (1, 32), "I64": (0, 64),
         "U64": (1, 64), "BOOL": (6, 8), "C64": (5, 64)}
NEW_TYPES = {"F8_E4M3": (10, 8), "F8_E5M2": (12, 8)}


class Dlpack(case.Case):
    def setUp(self):
        super().setUp()
        self.tensors = case.every_type()
        self.serve_tensors("planner", 1, self.tensors)
        self.handle = self.connect().acquire("planner")

    def check(self, managed, name, kinds, data=None):
        dtype, shape, expected = self.tensors[name]
        made = managed.tensor
        self.assertEqual((made.code, made.bits), kinds[dtype])
        self.assertEqual((made.lanes, made.byte_offset), (1, 0))
        self.assertEqual((made.device_type, made.device_id), (1, 0))
        self.assertEqual(made.shape[:made.ndim], shape)
        self.assertEqual(made.strides[:made.ndim], [shape[1], 1])
        self.assertEqual(c.string_at(made.data, len(expected)), expected)

    def test_a_consumer_that_names_no_version_gets_the_legacy_capsule(self):
        for options in ({}, {"max_version": None}, {"max_version": (0, 8)}, {"stream": None}):
            name, managed = opened(self.handle["of.F32"].__dlpack__(**options))
            self.assertEqual(name, b"dltensor")
            self.check(managed, "of.F32", TYPES)

    def test_a_consumer_of_version_1_gets_the_read_only_flag(self):
        for version in ((1, 0), (1, 1), (2, 0)):
            capsule = self.handle["of.F32"].__dlpack__(max_version=version)
            name, managed = opened(capsule)
            self.assertEqual(name, b"dltensor_versioned")
            self.assertEqual((managed.major, managed.minor, managed.flags), (1, 1, READ_ONLY))
            self.check(managed, "of.F32", TYPES)

    def test_every_type_has_its_code(self):
        for dtype in TYPES:
            with self.subTest(dtype):
                capsule = self.handle[f"of.{dtype}"].__dlpack__()
                self.check(opened(capsule)[1], f"of.{dtype}", TYPES)
        for dtype in NEW_TYPES:
            with self.subTest(dtype):
                for options in ({}, {"max_version": (1, 0)}):
                    with self.assertRaisesRegex(BufferError, f"{dtype}.*1.1.*torch"):
                        self.handle[f"of.{dtype}"].__dlpack__(**options)
                capsule = self.handle[f"of.{dtype}"].__dlpack__(max_version=(1, 1))
                self.check(opened(capsule)[1], f"of.{dtype}", NEW_TYPES)

    def test_a_copy_is_writable_and_says_so(self):
        tensor = self.handle["of.F32"]
        capsule = tensor.__dlpack__(max_version=(1, 0), copy=True)
        _, managed = opened(capsule)
        self.assertEqual(managed.flags, IS_COPIED)
        self.check(managed, "of.F32", TYPES)
        self.assertNotEqual(managed.tensor.data, tensor.data_ptr)
        c.memset(managed.tensor.data, 0, tensor.nbytes)
        self.assertEqual(bytes(tensor.view_bytes()), self.tensors["of.F32"][2])

    def test_another_device_is_refused(self):
        tensor = self.handle["of.F32"]
        for options in ({"dl_device": (2, 0), "copy": True}, {"dl_device": (2, 5), "copy": True},
                        {"dl_device": (2, 0), "copy": False}):
            with self.assertRaises(BufferError):
                tensor.__dlpack__(max_version=(1, 0), **options)
        _, managed = opened(tensor.__dlpack__(dl_device=(1, 0), copy=True))
        self.check(managed, "of.F32", TYPES)
        self.assertEqual(tensor.__dlpack_device__(), (1, 0))
        tensor.__dlpack__(dl_device=(1, 0))
        with self.assertRaisesRegex(BufferError, r"not on device \(2, 0\)"):
            tensor.__dlpack__(dl_device=(2, 0))

    def test_scalars_and_empty_tensors(self):
        for options in ({}, {"copy": True}, {"max_version": (1, 0)}):
            _, managed = opened(self.handle["scalar"].__dlpack__(**options))
            self.assertEqual(managed.tensor.ndim, 0)
            self.assertEqual(c.string_at(managed.tensor.data, 4), self.tensors["scalar"][2])
            _, managed = opened(self.handle["empty"].__dlpack__(**options))
            self.assertEqual(managed.tensor.shape[:2], [0, 3])
            self.assertEqual(managed.tensor.strides[:2], [3, 1])
            self.assertTrue(managed.tensor.data)  # Consumers take null for an error.

    def test_a_capsule_keeps_the_lease_until_its_deleter_ran_or_it_is_thrown_away(self):
        for version in (None, (1, 0)):
            untaken = self.handle["of.F32"].__dlpack__(max_version=version)
            taken = self.handle["of.F32"].__dlpack__(max_version=version)
            managed = taken_from(taken)
            self.handle.close()
            # A consumer has the struct, whatever becomes of the capsule.
            del taken
            self.check(managed, "of.F32", TYPES)
            del untaken
            self.assertEqual(self.leases(), 1)
            managed.deleter(c.addressof(managed))
            self.wait_leases(0)
            self.handle = self.connect().acquire("planner")
