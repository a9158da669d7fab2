"""ONNX Runtime, which knows nothing of modelhost, on the files of a version."""
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import engine_case  # noqa: E402
import engine_models  # noqa: E402
import harness  # noqa: E402

MODELS = ("inline", "outside")


class OnnxRuntime(engine_case.Case):
    def setUp(self):
        super().setUp()
        self.node = self.engines.node()

    def run_model(self, path, *flags):
        return [self.node, self.program("run_onnx.cjs"), str(path), *flags]

    def serve_models(self, residency, **shape):
        """Serves `inline` and `outside` (external data); what each gives when its files are read."""
        self.daemon_with(residency, "inline", more=engine_case.policy("outside", residency))
        expected = {}
        for model in MODELS:
            folder = engine_models.write_onnx(self.folder / f"{model}-{residency}", external=model == "outside", **shape)
            expected[model] = json.loads(self.plain(self.run_model(folder / "model.onnx")))
            self.serve(model, 1, folder=folder)
        return expected

    def test_a_model_gives_what_it_gives_from_its_file(self):
        for residency in engine_case.KINDS:
            expected = self.serve_models(residency)
            self.assertEqual(expected["inline"]["y"], expected["outside"]["y"])
            self.assertEqual(len(set(expected["inline"]["y"])), 64, "numbers that tell rows apart")
            for flags in ((), ("--fd-paths",), ("--keep-names",)):
                with self.subTest(residency=residency, flags=flags):
                    out = self.exec("inline", self.run_model("{model.onnx}"), flags)
                    self.assertEqual(json.loads(out), expected["inline"])
        print(expected["inline"]["engine"], end=" ", flush=True)

    def test_external_data_is_found_where_names_are_kept(self):
        for residency in engine_case.KINDS:
            expected = self.serve_models(residency)
            with self.subTest(residency=residency):
                out = self.exec("outside", self.run_model("{model.onnx}"), ("--keep-names",))
                self.assertEqual(json.loads(out), expected["outside"])
                # A folder and a name, as a program that makes the path itself does.
                out = self.exec("outside", self.run_model("{}/model.onnx"), ("--keep-names",))
                self.assertEqual(json.loads(out), expected["outside"])

    @harness.needs_root
    def test_why_external_data_needs_it(self):
        for residency, why in (("mapped", "Permission denied"), ("sealed", "No such file or directory")):
            self.serve_models(residency)
            with self.subTest(residency=residency):
                err = self.exec("outside", self.run_model("{model.onnx}"), expect=1)
                self.assertRegex(err, f"canonical path.*{why}")
                # A bare descriptor has no neighbours.
                err = self.exec("outside", self.run_model("{model.onnx}"), ("--fd-paths",), expect=1)
                self.assertIn("No such file or directory [/proc/self/fd/weights.bin]", err)

    def test_two_engines_map_one_copy_of_external_data(self):
        for residency, match in (("mapped", "/versions/1/weights.bin"), ("sealed", "memfd:modelhost:weights.bin")):
            self.serve_models(residency, rows=65536)
            table = 65536 * 64 * engine_models.F32
            running = [self.start("outside", self.run_model("{model.onnx}", "--touch", "--wait"), ("--keep-names",))
                       for _ in range(2)]
            pids = [program.engine_pid for program in running]
            memory = engine_case.shared_memory([self.daemon.process.pid, *pids], match)
            print(f"{residency}: 2 engines and the daemon have {memory['rss']} bytes resident of a table of {table}, "
                  f"PSS {memory['pss'] / table:.2f} x", end=" ", flush=True)
            for rss in memory["rss"][1:]:
                self.assertGreaterEqual(rss, table, "each has the table mapped")
            # All of it once, whoever else has the pages.
            self.assertLess(memory["pss"], 1.05 * table + (1 << 20))
            self.assertEqual(len(self.json("leases")["items"]), 2)
            for program in running:
                self.assertEqual(program.end(), 0)
            self.wait_leases(0)
