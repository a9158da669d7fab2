#!/usr/bin/env python3
"""Fails on constructions that this project does not use, on tests that no target lists, and on
paths of one machine in project files. Needs no build.

usage: check_banned.py [ROOT]

A line that must break a rule carries `lint: allow(RULE) REASON` in a comment on it or on the line
above.
"""
import pathlib
import re
import sys
from typing import NamedTuple, Optional

from repo_files import CXX_SUFFIXES, project_files


class Rule(NamedTuple):
    name: str
    pattern: str
    reason: str
    allowed: Optional[str] = None  # Files (matched from the start of the path) that may.
    only: Optional[str] = None  # The rule looks at these files only.
    raw: bool = False  # Look at comments and texts too.


TESTS = r".*_(test|fuzzer|bench)\.cc$|.*_test_\w+\.(h|cc)$|.*/testing/|tests/"
CALL = r"(?<![\w.>:])(?:::)?"  # A free function, not a member and not of another namespace.

RULES = [
    Rule("close", CALL + r"close\s*\(", "descriptors are closed by UniqueFd alone",
         r"proto/handle/unique_fd\.cc$|client/examples/|" + TESTS),
    Rule("open", CALL + r"(?:open|openat|openat2|creat)\s*\(",
         "files are opened through Os, or at the edge of a client program",
         r"daemon/(platform/|indexer/sandbox\.cc$)|client/(modelctl|src|examples)/|" + TESTS),
    Rule("mmap", CALL + r"(?:mmap|munmap|mremap|mprotect)\s*\(",
         "memory is mapped by proto/handle and Os alone",
         r"proto/handle/(mapping|region)\.cc$|daemon/platform/linux_os\.cc$|" + TESTS),
    Rule("detach", r"\.\s*detach\s*\(\s*\)", "every thread has an owner who joins it"),
    Rule("sleep", r"\b(?:sleep_for|sleep_until|usleep|nanosleep|SleepFor)\b|" + CALL + r"sleep\s*\(",
         "a test that sleeps is slow, or flaky, or both: wait for the event", only=TESTS),
    Rule("stdout", r"\bstd::(?:cout|cerr|clog)\b|" + CALL + r"(?:std::)?(?:printf|puts)\s*\(",
         "the daemon logs through its logger; --version and --check-config alone answer on stdout",
         only=r"daemon/(?!main\.cc$)(?!.*_(test|fuzzer|bench)\.cc$)"),
    Rule("catch-all", r"\bcatch\s*\(\s*\.\.\.\s*\)",
         "an unknown exception is our bug; only a C boundary may stop one", r"client/src/|" + TESTS),
    # The C++ header's value() throws when asked for what is not there, as std::optional does.
    # An extension of Python raises by throwing.
    Rule("throw", r"(?<!\w)throw\b(?!\s*\()", "errors are values", r"client/(include|python)/|" + TESTS),
    Rule("unfinished", r"\b(?:TODO|FIXME|XXX|HACK)\b", "finish it, or file it", raw=True),
    Rule("shell", CALL + r"(?:std::)?(?:system|popen)\s*\(", "no shell between us and a program"),
    Rule("tmpnam", CALL + r"(?:std::)?(?:tmpnam|tempnam|mktemp)\s*\(",
         "a name is not a file: use mkstemp, mkdtemp or O_TMPFILE"),
    Rule("unsafe-text", CALL + r"(?:std::)?(?:strcpy|strcat|sprintf|gets|strtok|atoi|atol)\s*\(",
         "no bound, or no error"),
    Rule("naked-new", r"(?<![\w:])new\s+[\w:]|(?<!operator )\bdelete\s+\w|\bdelete\s*\[\s*\]",
         "std::make_unique, or straight into a unique_ptr for a private constructor",
         # An interceptor factory has to return a plain pointer: gRPC's interface.
         r"client/src/|daemon/observe/rpc_observer\.cc$|" + TESTS),
    Rule("global", r"^(?:static\s+)?(?:std::)?(?:string|vector|map|unordered_map)\s*<?[\w:, ]*>?\s+"
         r"g_\w+", "no mutable globals"),
    Rule("rand", CALL + r"(?:std::)?(?:rand|srand)\s*\(", "take a seeded engine"),
    Rule("using-std", r"^\s*using\s+namespace\s+\w", "names say where they come from"),
    Rule("endl", r"\bstd::endl\b", "a line ends with \\n"),
    Rule("reinterpret-const", r"\bconst_cast\s*<", "a right is a type: do not cast it away",
         # Where a C interface, ours or the kernel's, has no const.
         r"proto/handle/|daemon/platform/|client/src/|" + TESTS),
]

# Built from pieces, so that this file does not find itself.
MACHINE_PATHS = re.compile(
    r"(?<![\w.])(?:" + "|".join(["/wo" r"rk/", "/ro" r"ot/(?!\.)", "/ho" r"me/(?!\$|<)\w",
                                 "/tmp/br" "ief", "/tmp/b" r"-\w"]) + ")")
TEXT_SUFFIXES = CXX_SUFFIXES | {".py", ".md", ".txt", ".cmake", ".proto", ".toml", ".json", ".service",
                                ".socket", ".yml", ".yaml", ".sh", ""}
ALLOW = re.compile(r"lint: allow\(([\w-]+)\)[ \t]+\S")

TOKENS = re.compile(
    r'(?P<line>//[^\n]*)|(?P<block>/\*.*?\*/)|(?P<raw>R"(?P<tag>[^()\s\\]{0,16})\(.*?\)(?P=tag)")'
    r'|(?P<text>"(?:\\.|[^"\\\n])*")|(?P<char>(?<![\w])\'(?:\\.|[^\'\\\n])+\')', re.S)


def strip_comments_and_texts(source):
    """The code of `source`, with comments and the inside of texts blanked, line by line the same."""
    def blank(match):
        kept = "".join("\n" if c == "\n" else " " for c in match.group(0))
        return '"' + kept[1:-1] + '"' if match.lastgroup in ("text", "raw") and len(kept) > 1 else kept
    return TOKENS.sub(blank, source)


def check_source(name, source):
    errors = []
    lines, code = source.splitlines(), strip_comments_and_texts(source).splitlines()
    for rule in RULES:
        if rule.allowed and re.match(rule.allowed, name):
            continue
        if rule.only and not re.match(rule.only, name):
            continue
        pattern = re.compile(rule.pattern)
        for number, line in enumerate(lines if rule.raw else code):
            if not pattern.search(line):
                continue
            near = lines[max(0, number - 1)] + "\n" + lines[number]
            if rule.name == "naked-new" and re.search(r"unique_ptr<|WrapUnique\(", near):
                continue
            if any(m.group(1) == rule.name for m in ALLOW.finditer(near)):
                continue
            errors.append(f"{name}:{number + 1}: {rule.name}: {rule.reason}: {lines[number].strip()}")
    return errors


def check_listed(root, names):
    """Every test, fuzzer and benchmark stands in the CMakeLists.txt of its folder (or above it)."""
    errors = []
    for name in names:
        if not re.search(r"_(test|fuzzer|bench)\.cc$", name):
            continue
        test = pathlib.PurePath(name)
        for folder in test.parents:
            lists = [root / folder / "CMakeLists.txt", *(root / folder).glob("*.cmake")]
            text = "\n".join(path.read_text() for path in lists if path.is_file())
            text = re.sub(r"#[^\n]*", "", text)
            if re.search(r"(?<![\w./-])" + re.escape(str(test.relative_to(folder))) + r"(?![\w./-])",
                         text):
                break
        else:
            errors.append(f"{name}: no CMakeLists.txt lists it, so it never runs")
    return errors


def check(root):
    errors = []
    names = project_files(root)
    errors += check_listed(root, names)
    for name in names:
        path = root / name
        suffix = pathlib.PurePath(name).suffix
        if suffix not in TEXT_SUFFIXES or path.stat().st_size > 1 << 20:
            continue
        data = path.read_bytes()
        if b"\0" in data:
            continue
        source = data.decode(errors="replace")
        for number, line in enumerate(source.splitlines(), 1):
            if MACHINE_PATHS.search(line):
                errors.append(f"{name}:{number}: a path of one machine: {line.strip()}")
        if suffix in CXX_SUFFIXES:
            errors += check_source(name, source)
    return errors


def main(argv):
    root = pathlib.Path(argv[1] if len(argv) > 1 else ".").resolve()
    errors = check(root)
    for error in errors:
        print(error)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
