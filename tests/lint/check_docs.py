#!/usr/bin/env python3
"""Fails if a page has a code block that no test runs and that does not say why.

usage: check_docs.py [ROOT]

The rules, and the table of pages and tests, are in tests/docs/blocks.py.
"""
import pathlib
import sys

from repo_files import project_files

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "docs"))
import blocks as docs  # noqa: E402


def check_page(page, text, table):
    found, errors = docs.parse(page, text)
    tests = table.get(page, {})
    for block in found:
        if not block.language:
            errors.append(f"{block.where}: the block names no language (```text is what is not run)")
        elif block.language in docs.NEVER_RUN:
            if block.rest:
                errors.append(f"{block.where}: nothing follows ```{block.language}")
        elif block.rest:
            if not docs.NOT_RUN.fullmatch(block.rest):
                errors.append(f"{block.where}: after the language comes nothing, or "
                              f"`not run: REASON`, not `{block.rest}`")
        elif block.language not in tests:
            errors.append(f"{block.where}: no test runs a block of {block.language} of this page "
                          "(name one in PAGES of tests/docs/blocks.py)")
    languages = {block.language for block in found if block.is_run}
    errors += [f"{page}: PAGES names a test for {language}, and the page has no such block"
               for language in tests if language not in languages]
    return errors


def check(root, table=None):
    table = docs.PAGES if table is None else table
    names = project_files(root)
    pages = [name for name in names if name.endswith(".md")]
    errors = []
    for page in pages:
        errors += check_page(page, (root / page).read_text(), table)
    for page, tests in table.items():
        if page not in pages:
            errors.append(f"{page}: PAGES of tests/docs/blocks.py names it, and it is not there")
        for test in sorted(set(tests.values())):
            if test not in names:
                errors.append(f"{page}: its test {test} is not there")
            elif page.rpartition("/")[2] not in (root / test).read_text():
                errors.append(f"{page}: its test {test} does not name it")
    return errors


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    errors = check(root)
    for error in errors:
        print(error)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
