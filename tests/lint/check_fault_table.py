#!/usr/bin/env python3
"""Fails if a table of faults names a test that does not exist, or a row names none.

usage: check_fault_table.py [ROOT]
"""
import pathlib
import re
import sys

from repo_files import project_files

TABLES = ["docs/format_faults.md", "docs/lifecycle_faults.md"]
GTEST = re.compile(r"^TEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\s*\)", re.MULTILINE)
PYTHON = re.compile(r"^ +def (test_\w+)\(", re.MULTILINE)


def known_tests(root):
    names = set()
    for name in project_files(root):
        path = pathlib.Path(name)
        if path.name.endswith("_test.cc"):
            names |= {f"{suite}.{test}" for suite, test in GTEST.findall((root / path).read_text())
                      if not test.startswith("DISABLED_")}
        elif re.fullmatch(r"test_\w+\.py", path.name):
            names |= {f"{path.name}::{test}" for test in PYTHON.findall((root / path).read_text())}
    return names


def check(root, known, table):
    errors, rows = [], 0
    for number, line in enumerate((root / table).read_text().splitlines(), 1):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|") or cells[-1] in ("tests", "---"):
            continue
        rows += 1
        if len(cells) != 4:
            errors.append(f"{table}:{number}: the row has {len(cells)} cells, not 4")
            continue
        tests = re.findall(r"`([^`]+)`", cells[3])
        if not tests:
            errors.append(f"{table}:{number}: the row names no test")
        errors += [f"{table}:{number}: there is no test {test}" for test in tests
                   if test not in known]
    if rows == 0:
        errors.append(f"{table}: no rows were found")
    return errors


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    known = known_tests(root)
    errors = [error for table in TABLES for error in check(root, known, table)]
    for error in errors:
        print(error)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
