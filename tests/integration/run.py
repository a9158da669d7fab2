#!/usr/bin/python3
"""Runs the integration tests; the last line is `N passed, N failed, N skipped`.

usage: run.py [--build DIR] [--folder DIR] [--files F[,F]] [--except F[,F]] [--smoke] [-k TEXT] [-v]

--build names a build folder with bin/ and lib/ (default build/release), --folder another folder of
such tests than this one. --smoke runs the cases that
are marked so: one or two of each kind, for slow builds.
"""
import argparse
import pathlib
import sys
import time
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(HERE))
import harness  # noqa: E402


class Outcome(unittest.TextTestResult):
    def startTest(self, test):
        super().startTest(test)
        self.started = time.monotonic()
        self.stream.write(f"{test.id()} ... ")
        self.stream.flush()

    def stopTest(self, test):
        super().stopTest(test)
        self.stream.write(f"{time.monotonic() - self.started:.1f} s\n")
        self.stream.flush()


def flatten(suite):
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from flatten(item)
        else:
            yield item


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", default=str(harness.ROOT / "build" / "release"))
    parser.add_argument("--folder", type=pathlib.Path, default=HERE)
    parser.add_argument("--files", default="")
    parser.add_argument("--except", dest="without", default="")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("-k", dest="text", action="append", default=[])
    parser.add_argument("-v", action="store_true")
    arguments = parser.parse_args()
    harness.use_build(arguments.build)
    sys.path.insert(0, str(arguments.folder.resolve()))
    names = arguments.files.split(",") if arguments.files else sorted(
        path.name for path in arguments.folder.glob("test_*.py"))
    names = [name for name in names if name not in arguments.without.split(",")]
    loader = unittest.TestLoader()
    tests = []
    for name in names:
        tests += flatten(loader.loadTestsFromName(name.removesuffix(".py")))
    if arguments.smoke:
        tests = [test for test in tests
                 if getattr(getattr(test, test._testMethodName, None), "smoke", False)]
    if arguments.text:
        tests = [test for test in tests if any(text in test.id() for text in arguments.text)]
    runner = unittest.TextTestRunner(stream=sys.stdout, resultclass=Outcome, verbosity=1)
    result = runner.run(unittest.TestSuite(tests))
    for test, reason in result.skipped:
        print(f"skipped: {test.id()}: {reason}")
    # A test whose subTests fail stands there once for each of them.
    failed = {getattr(test, "test_case", test).id() for test, _ in result.failures + result.errors}
    bad = len(failed) + len(result.unexpectedSuccesses)
    # A whole file that is skipped, or fails in its setUpModule, has no test that ran.
    skipped = [test for test, _ in result.skipped if isinstance(test, unittest.TestCase)]
    good = max(result.testsRun - bad - len(skipped) - len(result.expectedFailures), 0)
    if not tests:
        print("no test was found")
        bad = 1
    print(f"{good} passed, {bad} failed, {len(result.skipped)} skipped")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
