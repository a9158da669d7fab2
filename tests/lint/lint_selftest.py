#!/usr/bin/env python3
"""Shows that the checks of this folder notice what they are for: small bad trees, one breach each."""
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import check_banned  # noqa: E402
import check_docs  # noqa: E402
import check_fault_table  # noqa: E402
import check_includes  # noqa: E402


class Tree:
    """A throw-away source tree."""

    def __init__(self, files):
        self._dir = tempfile.TemporaryDirectory()
        self.root = pathlib.Path(self._dir.name)
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def __enter__(self):
        return self.root

    def __exit__(self, *_):
        self._dir.cleanup()


class Includes(unittest.TestCase):
    def complaints(self, name, include, **others):
        files = {name: f"#include {include}\n"}
        files.update({key.replace("__", "/") + ".h": "" for key in others})
        if include.startswith('"') and include[1:].split("/")[0] in ("proto", "daemon", "client"):
            files.setdefault(include.strip('"'), "")
        with Tree(files) as root:
            return check_includes.check(root)

    def test_a_layer_may_include_what_is_below_it(self):
        for name, include in [
                ("daemon/format/gguf.cc", '"proto/abi/dtype.h"'),
                ("daemon/store/store.cc", '"proto/handle/unique_fd.h"'),
                ("daemon/registry/registry.cc", '"daemon/region/loader.h"'),
                ("daemon/service/control.cc", '"modelhost/v1/control.pb.h"'),
                ("daemon/service/control.cc", "<grpcpp/grpcpp.h>"),
                ("client/examples/node.cc", '"modelhost/modelhost.hpp"'),
                ("client/ros/node/node.cc", '"client/examples/node.h"'),
                ("client/ros/node/node.cc", "<rclcpp_lifecycle/lifecycle_node.hpp>"),
                ("client/modelctl/inspect.cc", '"daemon/format/tensor_index.h"'),
                ("daemon/app.cc", '"daemon/service/control_service.h"'),
                ("daemon/store/store_test.cc", "<sys/mman.h>"),
                ("proto/handle/mapping.cc", "<sys/mman.h>"),
        ]:
            with self.subTest(f"{name} {include}"):
                self.assertEqual(self.complaints(name, include), [])

    def test_every_breach_is_seen(self):
        for name, include, word in [
                ("daemon/format/gguf.cc", '"daemon/platform/os.h"', "may not include"),
                ("daemon/platform/os.cc", '"daemon/registry/ids.h"', "may not include"),
                ("daemon/observe/metrics.cc", '"daemon/service/control.h"', "may not include"),
                ("daemon/registry/registry.cc", '"modelhost/v1/control.pb.h"', "may not include"),
                ("client/src/session.cc", '"daemon/registry/ids.h"', "may not include"),
                ("client/examples/node.cc", '"proto/handle/unique_fd.h"', "may not include"),
                ("client/ros/node/node.cc", '"client/src/session.h"', "may not include"),
                ("client/examples/node.cc", "<rclcpp/rclcpp.hpp>", "may only be included"),
                ("client/include/modelhost/modelhost.h", '"proto/abi/dtype.h"', "may not include"),
                ("client/include/modelhost/modelhost.h", "<grpcpp/grpcpp.h>", "may only be included"),
                ("client/src/session.cc", '"absl/status/status.h"', "no absl"),
                ("proto/handle/region.h", '"absl/status/status.h"', "no absl"),
                ("daemon/registry/registry.cc", "<prometheus/registry.h>", "may only be included"),
                ("daemon/store/store.cc", "<sys/mman.h>", "may only be included"),
                ("daemon/publish/broker.cc", "<sys/socket.h>", "may only be included"),
                ("daemon/region/loader.cc", "<cuda.h>", "may only be included"),
                ("daemon/main.cc", "<systemd/sd-daemon.h>", "may only be included"),
                ("daemon/region/loader.cc", '"tests/fakes/fake_os.h"', "production code includes"),
                ("daemon/region/loader.cc", '"loader.h"', "give the path from the root"),
                ("daemon/region/loader.cc", '"../store/store.h"', "give the path from the root"),
                ("daemon/region/loader.cc", "<daemon/region/loader.h>", "our own files"),
                ("daemon/cache/cache.cc", "<string>", "no entry in LAYERS"),
                ("daemon/helpers.cc", "<string>", "only the composition root"),
        ]:
            with self.subTest(f"{name} {include}"):
                found = self.complaints(name, include)
                self.assertTrue(any(word in error for error in found), found)

    def test_a_missing_file_is_seen(self):
        with Tree({"daemon/app.cc": '#include "daemon/store/gone.h"\n'}) as root:
            self.assertTrue(any("no such file" in e for e in check_includes.check(root)))

    def test_a_table_that_is_not_bottom_up_is_refused(self):
        self.assertEqual(check_includes.check_table(check_includes.LAYERS), [])
        turned = {"a": ["b"], "b": ["a"]}
        self.assertEqual(len(check_includes.check_table(turned)), 1)
        self.assertIn("not below it", check_includes.check_table(turned)[0])


class Banned(unittest.TestCase):
    def rules_hit(self, name, line):
        return {error.split(": ")[1] for error in check_banned.check_source(name, line + "\n")}

    def test_every_rule_fires(self):
        for rule, name, line in [
                ("close", "daemon/store/store.cc", "  ::close(fd);"),
                ("close", "daemon/store/store.cc", "  close(fd);"),
                ("open", "daemon/store/store.cc", "  int fd = ::open(path, O_RDONLY);"),
                ("mmap", "daemon/store/store.cc", "  ::munmap(p, n);"),
                ("detach", "daemon/app.cc", "  thread.detach();"),
                ("sleep", "daemon/store/store_test.cc", "  std::this_thread::sleep_for(1ms);"),
                ("stdout", "daemon/app.cc", '  std::cout << "x";'),
                ("stdout", "daemon/app.cc", '  printf("x");'),
                ("catch-all", "daemon/app.cc", "  } catch (...) {"),
                ("throw", "daemon/app.cc", "  throw std::runtime_error(x);"),
                ("unfinished", "daemon/app.cc", "  // " + "TO" + "DO: later"),
                ("shell", "client/modelctl/exec.cc", "  std::system(command);"),
                ("tmpnam", "client/modelctl/exec.cc", "  tmpnam(name);"),
                ("unsafe-text", "client/modelctl/exec.cc", "  strcpy(a, b);"),
                ("naked-new", "daemon/app.cc", "  auto* x = new Thing();"),
                ("naked-new", "daemon/app.cc", "  delete thing;"),
                ("rand", "daemon/app.cc", "  int x = rand();"),
                ("using-std", "daemon/app.cc", "using namespace std;"),
                ("endl", "client/modelctl/main.cc", "  out << std::endl;"),
                ("reinterpret-const", "daemon/app.cc", "  const_cast<char*>(p);"),
        ]:
            with self.subTest(f"{rule}: {line}"):
                self.assertIn(rule, self.rules_hit(name, line))

    def test_what_only_looks_alike_is_left_alone(self):
        for name, line in [
                ("proto/handle/unique_fd.cc", "  ::close(fd);"),
                ("daemon/app.cc", "  file.close();"),
                ("daemon/app.cc", "  os->open(path);"),
                ("daemon/app.cc", "  // A new file is opened: ::close(fd) is not ours; delete it."),
                ("daemon/app.cc", '  const char* text = "throw new things, ::open(x)";'),
                ("daemon/app.h", "  App(const App&) = delete;"),
                ("daemon/app.cc", "  return std::unique_ptr<App>(new App(x));"),
                ("daemon/store/store_test.cc", "  auto* x = new Thing();"),
                ("client/modelctl/main.cc", '  printf("x");'),
                ("daemon/app.cc", "  ::close(fd);  // lint: allow(close) before exec, nothing owns it"),
        ]:
            with self.subTest(f"{name}: {line}"):
                self.assertEqual(self.rules_hit(name, line), set())

    def test_an_allowance_needs_a_reason(self):
        self.assertIn("close", self.rules_hit("daemon/app.cc", "  ::close(fd);  // lint: allow(close)"))

    def test_a_test_that_no_target_lists_is_seen(self):
        with Tree({"daemon/store/store_test.cc": "",
                   "daemon/store/CMakeLists.txt": "# modelhost_test(x SRCS store_test.cc)\n"}) as root:
            self.assertTrue(any("never runs" in e for e in check_banned.check(root)))
        with Tree({"daemon/store/store_test.cc": "",
                   "daemon/store/CMakeLists.txt": "modelhost_test(x SRCS store_test.cc)\n"}) as root:
            self.assertEqual(check_banned.check(root), [])
        with Tree({"daemon/store/store_test.cc": "",
                   "daemon/store/CMakeLists.txt": "modelhost_test(x SRCS re_store_test.cc)\n"}) as root:
            self.assertTrue(check_banned.check(root))

    def test_a_path_of_one_machine_is_seen(self):
        with Tree({"README.md": "see /wo" + "rk/main\n"}) as root:
            self.assertTrue(any("one machine" in e for e in check_banned.check(root)))
        with Tree({"README.md": "a network/ and homework/ here\n"}) as root:
            self.assertEqual(check_banned.check(root), [])


class FaultTable(unittest.TestCase):
    def complaints(self, row):
        table = "| reported as | fault | right behaviour | tests |\n|---|---|---|---|\n" + row + "\n"
        files = {check_fault_table.TABLES[0]: table,
                 "a_test.cc": "TEST(Good, Is) {}\nTEST_F(Good, DISABLED_Not) {}\n",
                 "test_b.py": "class B:\n    def test_it(self):\n        pass\n"}
        with Tree(files) as root:
            return check_fault_table.check(root, check_fault_table.known_tests(root),
                                           check_fault_table.TABLES[0])

    def test_tests_that_exist_are_fine(self):
        self.assertEqual(self.complaints("| a | b | c | `Good.Is`, `test_b.py::test_it` |"), [])

    def test_rows_without_a_test_or_with_one_that_is_gone_are_named(self):
        for row in ("| a | b | c | `Good.Was` |", "| a | b | c | `Good.DISABLED_Not` |",
                    "| a | b | c | none |", "| a | b | `Good.Is` |", "| a | b | c | d | `Good.Is` |",
                    "no row at all"):
            self.assertEqual(len(self.complaints(row)), 1, row)


class Docs(unittest.TestCase):
    def complaints(self, text, table=None):
        files = {"page.md": text, "tests/t.py": "runs page.md\n"}
        with Tree(files) as root:
            return check_docs.check(root, {"page.md": table} if table else {})

    def test_blocks_that_a_test_runs_or_that_say_why_not_are_fine(self):
        self.assertEqual(self.complaints("```sh\nls\n```\n", {"sh": "tests/t.py"}), [])
        self.assertEqual(self.complaints("```text\n  picture\n```\n"), [])
        self.assertEqual(self.complaints("```sh not run: it takes hours\nls\n```\n"), [])
        self.assertEqual(self.complaints("1. A list\n\n    that goes on\n\ntext\n"), [])

    def test_a_block_that_nobody_runs_is_seen(self):
        for text, table, word in [
                ("```sh\nls\n```\n", None, "no test runs"),
                ("```sh\nls\n```\n```c\nx\n```\n", {"sh": "tests/t.py"}, "no test runs a block of c"),
                ("```\nls\n```\n", None, "names no language"),
                ("text\n\n    ls\n    ls\n\ntext\n", None, "indented"),
                ("```sh maybe\nls\n```\n", None, "not run: REASON"),
                ("```sh not run:\nls\n```\n", None, "not run: REASON"),
                ("```sh\nls\n", {"sh": "tests/t.py"}, "no end"),
                ("no block\n", {"sh": "tests/t.py"}, "has no such block"),
                ("```sh\nls\n```\n", {"sh": "tests/gone.py"}, "is not there"),
        ]:
            with self.subTest(text):
                found = self.complaints(text, table)
                self.assertEqual(len(found), 1, found)
                self.assertIn(word, found[0])


if __name__ == "__main__":
    unittest.main()
