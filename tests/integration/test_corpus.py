"""Real files of other projects: published, loaded, and read by a client byte for byte.

The files are not part of the tree: ../shared/corpus, or what MODELHOST_CORPUS names.
"""
import hashlib
import json
import os
import pathlib
import shutil
import unittest

from harness import EXIT_INTEGRITY, EXIT_OLD_SERVES, ROOT, Case

CORPUS = pathlib.Path(os.environ.get("MODELHOST_CORPUS", ROOT.parent / "shared" / "corpus"))
FORMATS = ("safetensors", "gguf", "onnx", "torch")


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def name_of(path):
    return "".join(c if c.isalnum() else "-" for c in path.name.lower()).strip("-")


@unittest.skipUnless((CORPUS / "EXPECT.json").is_file(), "there is no corpus of model files")
class RealFiles(Case):
    @classmethod
    def setUpClass(cls):
        cases = json.loads((CORPUS / "EXPECT.json").read_text())
        cases = cases if isinstance(cases, list) else cases["cases"]
        cls.expected = {case["file"]: case["expect"] for case in cases}

    def files(self, expect):
        for path in sorted((CORPUS / "real").rglob("*")):
            if self.expected.get(str(path.relative_to(CORPUS))) == expect:
                yield path

    def folder_of(self, path):
        """The file alone, with what it names: an ONNX model's data lies beside it."""
        folder = self.folder / ("src-" + name_of(path))
        folder.mkdir()
        shutil.copy(path, folder)
        if path.suffix == ".onnx":
            for data in path.parent.glob("*.bin"):
                shutil.copy(data, folder)
        return folder

    def check(self, path):
        folder, model = self.folder_of(path), name_of(path)
        shown = json.loads(self.ctl("inspect", path, "-o", "json").out)
        self.publish(model, 1, folder=folder)
        self.ctl("swap", model, "--version", 1)
        client = self.client()
        client.ok("acquire", ref=model)
        self.assertEqual(client.ok("file_digest", path=path.name)["sha256"],
                         sha256(path.read_bytes()))
        seen = {tensor["name"]: tensor for tensor in client.ok("digests")["tensors"]}
        self.assertEqual(len(seen), len(shown["tensors"]))
        mapped = 0
        for tensor in shown["tensors"]:
            view = seen[tensor["name"]]
            self.assertEqual(view["dtype"], tensor["dtype"])
            self.assertEqual(view["shape"], tensor["shape"])
            self.assertEqual(view["reason"], tensor.get("reason", ""))
            if "strides" in tensor:
                self.assertEqual(view["strides"], tensor["strides"])
            if not tensor["mappable"]:
                continue
            self.assertEqual(view["nbytes"], tensor["nbytes"])
            data = (folder / (tensor.get("file") or path.name)).read_bytes()
            data = data[tensor["offset"]:tensor["offset"] + tensor["nbytes"]]
            self.assertEqual(view["sha256"], sha256(data), tensor["name"])
            mapped += 1
        client.close()
        return mapped

    def test_every_mappable_tensor_of_every_real_file_is_read_as_it_stands_there(self):
        mapped = {}
        for path in self.files("index"):
            with self.subTest(file=path.name):
                kind = path.parent.name
                mapped[kind] = mapped.get(kind, 0) + self.check(path)
        for kind in ("safetensors", "onnx", "torch"):  # The GGUF file there has no tensors.
            self.assertGreater(mapped.get(kind, 0), 0, mapped)

    def test_real_files_that_are_refused_are_never_served(self):
        refused = 0
        for path in self.files("refuse"):
            with self.subTest(file=path.name):
                folder, model = self.folder_of(path), name_of(path)
                self.publish(model, 1, folder=folder)
                result = self.daemon.ctl("swap", model, "--version", "1")
                self.assertIn(result.code, (EXIT_INTEGRITY, EXIT_OLD_SERVES), str(result))
                self.assertIn(path.name, result.err)
                self.assertNotEqual(self.version_row(model, 1)["state"], "READY")
                refused += 1
        self.assertGreater(refused, 0)
