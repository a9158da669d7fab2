"""What an unmodified program sees of a version's files, in every form of path and residency. Needs no
engine; NumPy and PyTorch where Debian's packages are installed."""
import json
import os
import pathlib
import re
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import engine_case  # noqa: E402
import harness  # noqa: E402
import models  # noqa: E402

PYTHON = ["/usr/bin/python3", "-B"]
FORMS = {"folder": (), "descriptor": ("--fd-paths",)}


class Facts(engine_case.Case):
    def facts(self, name, flags=()):
        return json.loads(self.exec("planner", [*PYTHON, self.program("file_facts.py"), "{" + name + "}"], flags))

    def check(self, residency, expected):
        self.daemon_with(residency, "planner")
        self.serve("planner", 1)
        version = self.daemon.store / "models/planner/versions/1"
        for name in ("model.safetensors", "tokenizer.json"):
            digest = models.sha256(version / name)
            for form, flags in FORMS.items():
                with self.subTest(residency=residency, form=form, file=name):
                    facts = self.facts(name, flags)
                    for key in ("sha256", "map_shared", "map_private", "map_private_writable"):
                        self.assertEqual(facts.pop(key), digest, key)
                    self.assertRegex(facts.pop("path"), r"^/proc/self/fd/\d+$" if flags else f"/modelctl-exec-.*/{name}$")
                    facts.pop("realpath_is")
                    self.assertEqual(facts, {**self.both, **expected})

    # Reading, mapping, and locks that need no right to write are as on any file.
    both = {"stat_size": True, "own_offset": True, "flock_shared": "ok", "flock_exclusive": "ok",
            "flock_twice": "EAGAIN", "lock_read": "ok", "lock_write": "EBADF", "no_follow": "ELOOP", "direct": "ok", "noatime": "EPERM"}

    @harness.needs_root
    def test_of_a_mapped_file(self):
        self.check("mapped", {"open_rdwr": "EACCES", "write": "EACCES", "truncate": "EACCES", "open_truncate": "EACCES",
                              "map_shared_writable": "EACCES", "realpath": "EACCES"})

    @harness.needs_root
    def test_of_a_sealed_file(self):
        # A memfd may be opened for writing by anybody; the seals refuse what would change it.
        self.check("sealed", {"open_rdwr": "ok", "write": "EPERM", "truncate": "EPERM", "open_truncate": "EPERM",
                              "map_shared_writable": "EPERM", "realpath": "ENOENT"})

    def test_numbers_are_read_through_either_form(self):
        engine_case.need("numpy")
        code = """
import json, struct, sys
import numpy
with open(sys.argv[1], "rb") as file:
    size = struct.unpack("<Q", file.read(8))[0]
    header = json.loads(file.read(size))
begin, end = header["layer.1.weight"]["data_offsets"]
words = numpy.memmap(sys.argv[1], "<i8", "r", offset=8 + size + begin, shape=((end - begin) // 8,))
table = numpy.load(sys.argv[2], mmap_mode="r")
print(json.dumps({"seeds": sorted({int(word) >> 32 for word in words[::512]}), "sum": int(table.sum()),
                  "all": int(numpy.load(sys.argv[2]).sum()), "writeable": bool(words.flags.writeable)}))
"""
        for residency in engine_case.KINDS:
            self.daemon_with(residency, "planner")
            folder = models.simple_model(self.folder / f"src-{residency}", 7)
            self.plain([*PYTHON, "-c", f"import numpy; numpy.save({str(folder / 'table.npy')!r}, numpy.arange(4096))"])
            self.serve("planner", 7, folder=folder)
            for form, flags in FORMS.items():
                with self.subTest(residency=residency, form=form):
                    out = self.exec("planner", [*PYTHON, "-c", code, "{model.safetensors}", "{table.npy}"], flags)
                    self.assertEqual(json.loads(out), {"seeds": [7], "sum": 4096 * 4095 // 2, "all": 4096 * 4095 // 2,
                                                       "writeable": False})

    def test_torch_loads_its_checkpoint_through_either_form(self):
        engine_case.need("torch")
        # The two forms are one descriptor: the second is what the first links to.
        code = """
import os, sys, torch
folder, forms = sys.argv[1], 2
if sys.argv[2:] == ["make"]:
    forms = 1
    torch.save({"a": torch.arange(4096.0).reshape(64, 64), "b": torch.ones(3)}, folder + "/net.pt")
    torch.arange(16.0).numpy().tofile(folder + "/plain.bin")
for form in range(forms):
    paths = [folder + "/net.pt", folder + "/plain.bin"]
    if form:
        paths = [os.readlink(path) for path in paths]
        assert all(path.startswith("/proc/self/fd/") for path in paths), paths
    state = torch.load(paths[0], map_location="cpu")
    numbers = torch.FloatTensor(torch.FloatStorage.from_file(paths[1], shared=False, size=16))
    print([(name, list(tensor.shape), float(tensor.sum())) for name, tensor in state.items()], float(numbers.sum()))
"""
        folder = self.folder / "net"
        folder.mkdir()
        expected = self.plain([*PYTHON, "-c", code, str(folder), "make"])
        self.assertIn("('a', [64, 64], 8386560.0)", expected)
        for residency in engine_case.KINDS:
            self.daemon_with(residency, "net")
            self.serve("net", 1, folder=folder)
            with self.subTest(residency=residency):
                self.assertEqual(self.exec("net", [*PYTHON, "-c", code, "{}"]), 2 * expected)

    def test_a_last_resort_is_a_copy(self):
        """For what follows links on its own: a copy is private memory, but names are files."""
        self.daemon_with("sealed", "planner")
        self.serve("planner", 1)
        out = self.exec("planner", ["/bin/sh", "-euc", 'copy=$(mktemp -d); trap \'rm -r "$copy"\' EXIT; cp -rL "$0/." "$copy"; '
                                    'realpath "$copy/tokenizer.json" > /dev/null; cat "$copy/tokenizer.json"', "{}"])
        self.assertEqual(json.loads(out)["seed"], 1)


class Names(engine_case.Case):
    """--keep-names."""

    code = """
import ctypes, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.realpath.restype = libc.canonicalize_file_name.restype = ctypes.c_void_p
libc.realpath.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
libc.canonicalize_file_name.argtypes = [ctypes.c_char_p]

def real(path):
    text = libc.realpath(path.encode(), None)
    if text is None:
        return os.strerror(ctypes.get_errno())
    buffer = ctypes.create_string_buffer(4096)
    same = libc.canonicalize_file_name(path.encode())
    assert libc.realpath(path.encode(), buffer) and buffer.value == ctypes.string_at(text) == ctypes.string_at(same)
    return ctypes.string_at(text).decode()

folder, file = sys.argv[1], sys.argv[2]
os.chdir(folder)
os.symlink("gone", "dangling")
os.symlink("/proc/self/fd/4000", "closed")
os.symlink("/etc", "away")
os.symlink("/usr/bin/python3", "another")
print(json.dumps({"folder": folder, "preload": os.environ.get("LD_PRELOAD", ""),
    "is": {path: real(path) for path in (file, "tokenizer.json", "./sub/../tokenizer.json", "sub/a.json", "sub", "", ".",
    "tokenizer.json/", "absent", "dangling", "closed", "away", "another", "sub/.", "sub/..",
    "/proc/self/fd", "/dev/stdin", "/etc/../etc/hostname", "x" * 4090,
    "x" * 5000, "x/" * 2500 + "x")}}))
"""

    def resolved(self, flags, env=None):
        done = self.daemon.ctl("exec", *flags, "planner", "--", *PYTHON, "-c", self.code, "{}", "{model.safetensors}",
                               user=harness.CLIENT, env=env)
        self.assertEqual(done.code, 0, str(done))
        return json.loads(done.out)

    def serve_tree(self, residency):
        self.daemon_with(residency, "planner")
        folder = models.simple_model(self.folder / f"src-{residency}", 1)
        (folder / "sub").mkdir()
        (folder / "sub" / "a.json").write_text("{}")
        self.serve("planner", 1, folder=folder)

    def test_real_paths_are_the_names_in_the_folder(self):
        for residency in engine_case.KINDS:
            self.serve_tree(residency)
            with self.subTest(residency=residency):
                answer = self.resolved(["--keep-names"])
                folder, real = answer["folder"], answer["is"]
                for path in ("model.safetensors", "tokenizer.json", "sub/a.json"):
                    self.assertEqual(real.get(path, real.get(f"{folder}/{path}")), f"{folder}/{path}")
                self.assertEqual(real["./sub/../tokenizer.json"], f"{folder}/tokenizer.json")
                # All else is libc's answer.
                self.assertEqual((real["sub"], real["."], real["away"]), (f"{folder}/sub", folder, "/etc"))
                self.assertEqual(real["/etc/../etc/hostname"], os.path.realpath("/etc/hostname"))
                # Also for a link to a descriptor that is not of the folder.
                self.assertEqual(real["/dev/stdin"], "/dev/null")
                self.assertRegex(real["/proc/self/fd"], r"^/proc/\d+/fd$")
                self.assertEqual((real["another"], real["sub/."], real["sub/.."]),
                                 (os.path.realpath("/usr/bin/python3"), f"{folder}/sub", folder))
                for path in ("x" * 4090, "x" * 5000):
                    self.assertEqual(real[path], "File name too long")
                self.assertIn(real["tokenizer.json/"], ("Permission denied", "No such file or directory"))
                for path in ("", "x/" * 2500 + "x", "absent", "dangling", "closed"):
                    self.assertEqual(real[path], "No such file or directory", path)

    @harness.needs_root
    def test_without_it_they_lead_away(self):
        for residency, why in (("mapped", "Permission denied"), ("sealed", "No such file or directory")):
            self.serve_tree(residency)
            with self.subTest(residency=residency):
                answer = self.resolved([])
                self.assertEqual(answer["preload"], "")
                self.assertEqual(answer["is"]["tokenizer.json"], why)

    def test_what_is_preloaded_already_stays(self):
        self.serve_tree("mapped")
        answer = self.resolved(["--keep-names"], {"LD_PRELOAD": "libutil.so.1"})
        self.assertRegex(answer["preload"], r"^libutil\.so\.1:/.*/libmodelhost-exec\.so$")

    def test_it_does_not_go_with_bare_descriptors(self):
        self.serve_tree("mapped")
        self.ctl("exec", "--keep-names", "--fd-paths", "planner", "--", "/bin/true", expect=harness.EXIT_USAGE)

    def test_the_library_is_looked_for_where_it_is_installed(self):
        self.serve_tree("mapped")
        place = self.folder / "elsewhere" / "bin"
        place.mkdir(parents=True)
        shutil.copy(harness.PROGRAMS.ctl, place)

        def run():
            process = self.daemon.ctl_start("exec", "--keep-names", "planner", "--", "/bin/sh", "-c", "echo $LD_PRELOAD",
                                            user=harness.CLIENT, program=str(place / "modelctl"))
            out, err = process.communicate(timeout=harness.DEADLINE_S)
            return process.returncode, out, err

        code, out, err = run()
        self.assertEqual((code, out), (harness.EXIT_RESOURCES, ""), err)
        said = re.match(r"error: --keep-names: libmodelhost-exec\.so is not where .*elsewhere/bin/modelctl looks for it "
                        r"\((\S+) beside it; install", err)
        self.assertTrue(said, err)
        folder = pathlib.Path(os.path.normpath(place / said.group(1)))
        folder.mkdir(parents=True)
        shutil.copy(harness.PROGRAMS.lib / "libmodelhost-exec.so", folder)
        self.assertEqual(run(), (0, f"{folder}/libmodelhost-exec.so\n", ""))
