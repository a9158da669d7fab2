"""The code blocks of the documentation, and which test runs those of which page.

A block is fenced, and its first word says what it is:

    ```sh                        run by the test that PAGES names for this page and language
    ```text                      nothing that could be run: a picture, an output, a file's layout
    ```sh not run: REASON        a command that no test can run, and why

tests/lint/check_docs.py fails for a block that is none of these, so a page cannot get one that
nobody runs; and the tests take blocks through `Page`, which fails when one of a language that they
run was left over.
"""
import dataclasses
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

# Page: {language: the file of the test that runs, compiles or checks each of its blocks}.
PAGES = {
    "README.md": {"sh": "tests/docs/test_readme.py", "c": "tests/docs/test_readme.py",
                  "python": "tests/docs/test_readme.py"},
    "client/README.md": {"cpp": "tests/docs/test_client_readme.py",
                         "cmake": "tests/docs/test_client_readme.py"},
    "client/modelctl/README.md": {"sh": "tests/docs/test_operators.py"},
    "docs/cpp.md": {language: "tests/docs/test_cpp.py" for language in ("sh", "cmake", "cpp", "c")},
    "docs/desired_state.md": {"toml": "tests/docs/test_operators.py",
                              "desired": "tests/docs/test_operators.py",
                              "yaml": "tests/docs/test_operators.py",
                              "sh": "tests/docs/test_operators.py"},
    "docs/device.md": {"toml": "tests/docs/test_operators.py"},
    "docs/exec.md": {language: "tests/engines/test_guide.py"
                     for language in ("sh", "js", "python", "ini")},
    "docs/formats.md": {"sh": "tests/docs/test_operators.py"},
    "docs/grpc_workers.md": {language: "tests/docs/test_grpc_workers.py"
                             for language in ("sh", "proto", "c", "python")},
    "docs/lifecycle.md": {"mermaid": "daemon/registry/lifecycle_doc_test.cc"},
    "docs/operations.md": {"sh": "tests/docs/test_operators.py",
                           "toml": "tests/docs/test_operators.py",
                           "ini": "tests/docs/test_operators.py"},
    "docs/python.md": {"sh": "tests/docs/test_python.py", "python": "tests/docs/test_python.py"},
    "docs/quickstart.md": {language: "tests/docs/test_quickstart.py"
                           for language in ("sh", "cpp", "python")},
    "docs/ros.md": {language: "tests/docs/test_ros.py" for language in ("sh", "xml", "cmake", "cpp")},
}

NEVER_RUN = {"text"}
NOT_RUN = re.compile(r"not run: \S.*")
_FENCE = re.compile(r"^ {0,3}(```+|~~~+) *(.*?) *$")


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block. `line` is that of its first fence, `rest` what follows the language."""

    page: str
    line: int
    language: str
    rest: str
    text: str

    @property
    def where(self):
        return f"{self.page}:{self.line}"

    @property
    def is_run(self):
        return self.language not in NEVER_RUN and not self.rest


def parse(page, text):
    """(blocks, errors) of a page: an error is a line that says what is wrong with the page itself."""
    blocks, errors = [], []
    lines = text.split("\n")
    number, after_blank, in_list = 0, True, False
    while number < len(lines):
        line = lines[number]
        fence = _FENCE.match(line)
        if fence:
            mark, (language, _, rest) = fence[1], fence[2].partition(" ")
            end = number + 1
            while end < len(lines) and not re.fullmatch(rf" {{0,3}}{mark}+ *", lines[end]):
                end += 1
            if end == len(lines):
                errors.append(f"{page}:{number + 1}: this block has no end")
            blocks.append(Block(page, number + 1, language, rest.strip(),
                                "".join(row + "\n" for row in lines[number + 1:end])))
            number = end + 1
            after_blank = False
            continue
        if re.match(r"[*+-] |\d+[.)] ", line):
            in_list = True
        elif line and not line[0].isspace():
            in_list = False
        if line.startswith("    ") and line.strip() and after_blank and not in_list:
            errors.append(f"{page}:{number + 1}: an indented block (fence it: ``` and its language)")
            while number + 1 < len(lines) and re.match(r"    |$", lines[number + 1]):
                number += 1
        after_blank = not line.strip()
        number += 1
    return blocks, errors


def read(page, root=ROOT):
    return parse(page, (root / page).read_text())


class Page:
    """The blocks of a page for one test: what is to be run must be taken."""

    def __init__(self, page):
        self.blocks = [block for block in read(page)[0] if block.is_run]
        if not self.blocks:
            raise AssertionError(f"{page} has no block to run (is it still to be in PAGES?)")
        self._left = list(self.blocks)

    def take(self, *languages):
        """All blocks of these languages, in order."""
        taken = [block for block in self.blocks if block.language in languages]
        for block in taken:
            if block in self._left:
                self._left.remove(block)
        return taken

    def one(self, language, containing):
        """The only block of that language with that text in it."""
        found = [block for block in self.blocks
                 if block.language == language and containing in block.text]
        if len(found) != 1:
            raise AssertionError(f"{len(found)} blocks of {language} have {containing!r}, not one")
        if found[0] in self._left:
            self._left.remove(found[0])
        return found[0]

    @property
    def left(self):
        """Where blocks are that nobody took."""
        return [f"{block.where} ({block.language})" for block in self._left]
