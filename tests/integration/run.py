#!/usr/bin/python3
"""Runs the integration tests; the last line is `N passed, N failed, N skipped`.

usage: run.py [--build DIR] [--folder DIR] [--files F[,F]] [--except F[,F]] [--smoke] [--jobs N]
              [-k TEXT] [-v]

--build names a build folder with bin/ and lib/ (default build/release), --folder another folder of
such tests than this one. --smoke runs the cases that are marked so: one or two of each kind, for
slow builds. --jobs runs that many files at once, each in a process of its own that may take
MODELHOST_FILE_SECONDS (600) and whose output is shown when it ends.
"""
import argparse
import concurrent.futures
import os
import pathlib
import re
import signal
import subprocess
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


SUMMARY = re.compile(r"(\d+) passed, (\d+) failed, (\d+) skipped")
NO_TEST = "no test was found"
# The long ones first, so that none of them is left alone at the end.
LONGEST = ["test_crash_restore.py", "test_crash.py"]


def run_file(name, rest):
    """Its output, and its counts: passed, failed, skipped."""
    limit = float(os.environ.get("MODELHOST_FILE_SECONDS", "600"))
    started = time.monotonic()
    child = subprocess.Popen([sys.executable, "-B", __file__, "--files", name, *rest],
                             stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True, errors="replace",
                             start_new_session=True, preexec_fn=harness.end_with_us)
    how = ""
    try:
        out, _ = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        how = f"it took more than {limit:.0f} s"
        os.killpg(child.pid, signal.SIGKILL)
        out, _ = child.communicate()
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        raise
    lines = out.splitlines()
    last = SUMMARY.fullmatch(lines[-1]) if lines else None
    if last:
        lines.pop()
        counts = [int(number) for number in last.groups()]
        if NO_TEST in lines and ("-k" in rest or "--smoke" in rest):
            counts[1] -= 1
        elif child.returncode != 0 and counts[1] == 0:
            how = f"it ended with {child.returncode}"
            counts[1] = 1
    else:
        how = how or f"it ended with {child.returncode} and no last line"
        counts = [0, 1, 0]
    if how:
        lines.append(f"FAIL: {name}: {how}")
    lines.append(f"-- {name}: {counts[0]} passed, {counts[1]} failed, {counts[2]} skipped "
                 f"({time.monotonic() - started:.0f} s)")
    return "\n".join(lines), counts


def run_files(names, jobs, rest):
    names = sorted(names, key=lambda name: (name not in LONGEST, name))
    total = [0, 0, 0]
    # The threads that start children last as long as they: end_with_us is about a thread.
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for done in concurrent.futures.as_completed(
                [pool.submit(run_file, name, rest) for name in names]):
            text, counts = done.result()
            print(text, flush=True)
            total = [a + b for a, b in zip(total, counts)]
    if sum(total) == 0:
        print(NO_TEST)
        total[1] = 1
    print(f"{total[0]} passed, {total[1]} failed, {total[2]} skipped")
    return 1 if total[1] else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", default=str(harness.ROOT / "build" / "release"))
    parser.add_argument("--folder", type=pathlib.Path, default=HERE)
    parser.add_argument("--files", default="")
    parser.add_argument("--except", dest="without", default="")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("-k", dest="text", action="append", default=[])
    parser.add_argument("-v", action="store_true")
    arguments = parser.parse_args()
    names = arguments.files.split(",") if arguments.files else sorted(
        path.name for path in arguments.folder.glob("test_*.py"))
    names = [name for name in names if name not in arguments.without.split(",")]
    if arguments.jobs > 1 and len(names) > 1:
        rest = ["--build", arguments.build, "--folder", str(arguments.folder)]
        rest += ["--smoke"] * arguments.smoke + ["-v"] * arguments.v
        for text in arguments.text:
            rest += ["-k", text]
        return run_files(names, arguments.jobs, rest)
    harness.use_build(arguments.build)
    sys.path.insert(0, str(arguments.folder.resolve()))
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
        print(NO_TEST)
        bad = 1
    print(f"{good} passed, {bad} failed, {len(result.skipped)} skipped")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
