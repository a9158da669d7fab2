"""llama.cpp, which knows nothing of modelhost, on the files of a version."""
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import engine_case  # noqa: E402
import engine_models  # noqa: E402


class Llama(engine_case.Case):
    def setUp(self):
        super().setUp()
        self.node = self.engines.node(least=20)

    def run_model(self, path, *flags):
        return [self.node, self.program("run_llama.mjs"), str(path), *flags]

    def serve_llama(self, version, **shape):
        folder = self.folder / f"chat-{version}-{len(list(self.folder.iterdir()))}"
        path = engine_models.write_llama(folder / "chat.gguf", seed=version, **shape)
        self.serve("chat", version, folder=folder)
        return folder / path.name

    def test_it_says_what_it_says_from_the_file(self):
        expected = None
        for residency in engine_case.KINDS:
            self.daemon_with(residency, "chat")
            path = self.serve_llama(1)
            if expected is None:
                expected = self.plain(self.run_model(path))
                self.assertEqual(len(json.loads(expected)["tokens"]), 8)
                print(f"node-llama-cpp {self.engines.version('node-llama-cpp')}", end=" ", flush=True)
            with self.subTest(residency=residency):
                self.assertEqual(self.exec("chat", self.run_model("{chat.gguf}", "--link-too")), expected)
        self.assertEqual(self.exec("chat", self.run_model("{chat.gguf}"), ("--fd-paths",)), expected)

    def test_a_split_model_is_found_by_its_first_file(self):
        self.daemon_with("mapped", "chat")
        folder = self.folder / "split"
        first = engine_models.write_split_llama(folder)
        expected = self.plain(self.run_model(first))
        self.serve("chat", 1, folder=folder)
        self.assertEqual(self.exec("chat", self.run_model("{" + first.name + "}")), expected)

    def test_two_engines_map_one_copy_and_a_swap_touches_neither(self):
        for residency in engine_case.KINDS:
            with self.subTest(residency=residency):
                self.daemon_with(residency, "chat")
                size = self.serve_llama(1, width=512, hidden=2048, blocks=2, heads=8).stat().st_size
                command = self.run_model("{chat.gguf}", "--wait")
                running = [self.start("chat", command) for _ in range(2)]
                pids = [program.engine_pid for program in running]
                memory = engine_case.shared_memory([self.daemon.process.pid, *pids], "chat.gguf")
                print(f"2 engines and the daemon have {memory['rss']} bytes resident of a file of {size}, "
                      f"PSS {memory['pss'] / size:.2f} x", end=" ", flush=True)
                for rss in memory["rss"][1:]:
                    self.assertGreater(rss, 0.9 * size, "each has the weights mapped")
                self.assertLess(memory["pss"], 1.05 * size + (1 << 20))
                self.serve_llama(2, width=512, hidden=2048, blocks=2, heads=8)
                newer = self.start("chat", command)
                self.assertNotEqual(newer.answer["tokens"], running[0].answer["tokens"])
                self.assertEqual(running[0].answer, running[1].answer)
                self.assertEqual(sorted(row["version"] for row in self.json("leases")["items"]), [1, 1, 2])
                # What runs goes on with what it has, and says the same.
                self.assertEqual(running[0].ask("again"), running[0].answer)
                for program in [*running, newer]:
                    self.assertEqual(program.end(), 0)
                self.wait_leases(0)
