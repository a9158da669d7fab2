"""ONNX Runtime, which knows nothing of modelhost, on the files of a version."""
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import engine_case  # noqa: E402
import engine_models  # noqa: E402
import harness  # noqa: E402

class OnnxRuntime(engine_case.Case):
    """Models `inline`, and `outside`, which is the same with external data."""

    plain_answer = None  # What the engine gives when it has the files themselves.

    def setUp(self):
        super().setUp()
        self.node = self.engines.node()
        if OnnxRuntime.plain_answer is None:
            outs = {self.plain(self.run_model(self.write(model, self.folder / f"plain-{model}") / "model.onnx"))
                    for model in ("inline", "outside")}
            self.assertEqual(len(outs), 1, "where weights stand changes nothing")
            OnnxRuntime.plain_answer = json.loads(outs.pop())
        self.assertEqual(len(set(self.plain_answer["y"])), 64, "numbers that tell rows apart")

    def write(self, model, folder, **shape):
        return engine_models.write_onnx(folder, external=model == "outside", **shape)

    def run_model(self, path, *flags):
        return [self.node, self.program("run_onnx.cjs"), str(path), *flags]

    def serve_model(self, residency, model, **shape):
        self.daemon_with(residency, model)
        self.serve(model, 1, folder=self.write(model, self.folder / f"{model}-{residency}", **shape))

    def test_a_model_gives_what_it_gives_from_its_file(self):
        for residency in engine_case.KINDS:
            self.serve_model(residency, "inline")
            for flags in ((), ("--keep-names",)):
                with self.subTest(residency=residency, flags=flags):
                    out = self.exec("inline", self.run_model("{model.onnx}", "--link-too"), flags)
                    self.assertEqual(json.loads(out), self.plain_answer)
        out = self.exec("inline", self.run_model("{model.onnx}"), ("--fd-paths",))
        self.assertEqual(json.loads(out), self.plain_answer)
        print(f"onnxruntime-node {self.engines.version('onnxruntime-node')}", end=" ", flush=True)

    def test_external_data_is_found_where_names_are_kept(self):
        for residency in engine_case.KINDS:
            self.serve_model(residency, "outside")
            # The other one as a program has it that makes the path itself.
            path = "{model.onnx}" if residency == "mapped" else "{}/model.onnx"
            with self.subTest(residency=residency):
                out = self.exec("outside", self.run_model(path), ("--keep-names",))
                self.assertEqual(json.loads(out), self.plain_answer)

    @harness.needs_root
    def test_why_external_data_needs_it(self):
        for residency, why in (("mapped", "Permission denied"), ("sealed", "No such file or directory")):
            self.serve_model(residency, "outside")
            with self.subTest(residency=residency):
                err = self.exec("outside", self.run_model("{model.onnx}"), expect=1)
                self.assertRegex(err, f"canonical path.*{why}")
                # A bare descriptor has no neighbours.
                err = self.exec("outside", self.run_model("{model.onnx}"), ("--fd-paths",), expect=1)
                self.assertIn("No such file or directory [/proc/self/fd/weights.bin]", err)

    def test_two_engines_map_one_copy_of_external_data(self):
        for residency, match in (("mapped", "/versions/1/weights.bin"), ("sealed", "memfd:modelhost:weights.bin")):
            self.serve_model(residency, "outside", rows=65536)
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
