#!/usr/bin/env python3
"""Fails if a file includes a folder that its layer may not see. Needs no build.

usage: check_includes.py [ROOT]

The tables below are the architecture: LAYERS says who may include whom, HOMES gives system and
third-party headers the few files that may use them.
"""
import pathlib
import re
import sys

from repo_files import cxx_files

# Folder -> folders that it may include beside itself. From the bottom to the top: a folder may
# name only folders above it in this list, so the table cannot hold a cycle.
LAYERS = {
    "proto/modelhost": [],  # generated messages and stubs
    "proto/abi": [],
    "proto/handle": ["proto/abi"],
    "proto/cuda": ["proto/handle"],
    "client/include": [],
    "daemon/format": ["proto/abi"],
    "daemon/indexer": ["proto/handle", "daemon/format"],
    "daemon/platform": ["proto/handle"],
    "daemon/store": ["proto/abi", "proto/handle", "daemon/platform", "daemon/format"],
    "daemon/region": ["proto/abi", "proto/handle", "daemon/format", "daemon/platform",
                      "daemon/store"],
    "daemon/registry": ["proto/abi", "proto/handle", "daemon/platform", "daemon/store",
                        "daemon/region"],
    "daemon/publish": ["proto/abi", "proto/handle", "daemon/format", "daemon/platform",
                       "daemon/store", "daemon/region", "daemon/registry"],
    "daemon/observe": ["daemon/platform", "daemon/registry"],
    "daemon/service": ["proto/modelhost", "daemon/platform", "daemon/store", "daemon/region",
                       "daemon/registry"],
    "daemon/device_agent": ["proto/handle", "proto/cuda", "daemon/platform", "daemon/region"],
    "client/src": ["proto/abi", "proto/handle", "proto/cuda", "client/include"],
    "client/examples": ["client/include"],
    "client/python": ["client/include"],
    "client/ros": ["client/include", "client/examples"],
    "client/exec_names": [],
    "client/modelctl": ["proto/modelhost", "proto/abi", "proto/handle", "client/include",
                        "daemon/format"],
    "daemon": ["*"],  # main, app, config: the one composition root
}
COMPOSITION_ROOT = re.compile(r"daemon/(main|app|config|runtime_dir)(_\w+)?\.(cc|h)$")

# Start of an included path -> the only files (tests aside) that may include it.
HOMES = {
    "grpcpp/": r"daemon/(service|observe)/|client/modelctl/|daemon/(main|app)",
    "grpc/": r"daemon/(service|observe)/|client/modelctl/|daemon/(main|app)",
    "google/protobuf/": r"daemon/(service|observe)/|client/modelctl/",
    "prometheus/": r"daemon/observe/",
    "spdlog/": r"daemon/",
    "simdjson": r"daemon/|client/modelctl/",
    "toml++/": r"daemon/(store/|config)",
    "toml.hpp": r"daemon/(store/|config)",
    "re2/": r"daemon/store/name_patterns\.cc$",
    "CLI/": r"daemon/(main|config)|client/modelctl/",
    "pybind11/": r"client/python/",
    "rclcpp": r"client/ros/",
    "cuda": r"proto/cuda/|daemon/device_agent/|client/src/cuda_",
    "liburing": r"daemon/platform/",
    "openssl/": r"daemon/(platform|store|region|registry)/",
    "seccomp.h": r"daemon/indexer/sandbox\.cc$",
    "zlib.h": r"daemon/format/zip_directory\.cc$",
    "systemd/": r"daemon/platform/systemd\.cc$",
    "sys/mman.h": r"proto/handle/(mapping|region)\.cc$|daemon/platform/linux_os\.cc$",
    "sys/socket.h": r"proto/handle/fd_channel\.cc$|daemon/platform/(peer|unix_listener)\.cc$",
    "sys/un.h": r"proto/handle/fd_channel\.cc$|daemon/platform/(peer|unix_listener)\.cc$",
}
# libmodelhost.so links libc and libstdc++ only, and so do the public headers that a node compiles.
NO_ABSL = re.compile(r"proto/|client/(include|src|examples|python|ros|exec_names)/")

INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]')
TEST_FILE = re.compile(r"_(test|fuzzer|bench)\.cc$|_test_\w+\.(h|cc)$|/testing/")


def layer_of(path):
    """The folder of LAYERS that `path` (an included path, or a file of ours) belongs to, or None."""
    if re.match(r"modelhost/v\d+/", path):
        return "proto/modelhost"
    if path.startswith("modelhost/"):
        return "client/include"
    folder = path.rpartition("/")[0]
    fits = [key for key in LAYERS
            if folder == key or (key != "daemon" and folder.startswith(key + "/"))]
    return max(fits, key=len, default=None)


def check_table(layers):
    errors, seen = [], set()
    for folder, below in layers.items():
        errors += [f"LAYERS[{folder!r}] names {name!r}, which is not below it"
                   for name in below if name != "*" and name not in seen]
        seen.add(folder)
    return errors


def check_file(root, name):
    errors = []
    me = layer_of(name)
    is_test = bool(TEST_FILE.search(name))
    if me is None:
        return [f"{name}: its folder has no entry in LAYERS"]
    if me == "daemon" and not COMPOSITION_ROOT.match(name) and not is_test:
        errors.append(f"{name}: only the composition root lies in daemon/ itself")
    for number, line in enumerate((root / name).read_text(errors="replace").splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        quote, path = match.groups()
        where = f"{name}:{number}"
        if path.startswith((".", "/")):
            errors.append(f"{where}: {path}: give the path from the root of the tree")
            continue
        if not is_test:
            for prefix, home in HOMES.items():
                if path.startswith(prefix) and not re.match(home, name):
                    errors.append(f"{where}: {path} may only be included from {home}")
            if path.startswith("tests/"):
                errors.append(f"{where}: production code includes {path}")
            if path.startswith("absl/") and NO_ABSL.match(name):
                errors.append(f"{where}: {path}: no absl in what libmodelhost.so links")
        ours = path.split("/")[0] in ("proto", "daemon", "client", "tests")
        if ours and not (root / path).is_file():
            errors.append(f"{where}: {path}: there is no such file")
        if ours and quote == "<":
            errors.append(f'{where}: {path}: our own files are included with "..."')
        if not ours and quote == '"' and "/" not in path:
            errors.append(f"{where}: {path}: give the path from the root of the tree")
        to = layer_of(path)
        if to and to != me and "*" not in LAYERS[me] and to not in LAYERS[me]:
            errors.append(f"{where}: {me} may not include {to} ({path})")
    return errors


def check(root):
    errors = check_table(LAYERS)
    for name in cxx_files(root):
        if name.split("/")[0] in ("proto", "daemon", "client"):
            errors += check_file(root, name)
    return errors


def main(argv):
    root = pathlib.Path(argv[1] if len(argv) > 1 else ".").resolve()
    errors = check(root)
    for error in errors:
        print(error)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
