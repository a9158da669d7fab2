#!/usr/bin/python3
"""Brings the npm packages of package-lock.json into build/engines, once.

  install.py     installs them, or says why they cannot be had (exit status 77)

A package's own scripts are not run: they would download what the tests do not use. Of the binaries for
other systems nothing is kept.
"""
import fcntl
import hashlib
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
CACHE = HERE.parent.parent / "build" / "engines"
LIMIT_S = 400
# What npm says when there is no registry, or it does not have a package: not a fault of ours.
NO_REGISTRY = re.compile(r"code (ENOTFOUND|ECONNREFUSED|ECONNRESET|EHOSTUNREACH|ENETUNREACH|ETIMEDOUT|EAI_AGAIN|"
                         r"ERR_SOCKET_TIMEOUT|ENOTCACHED|SELF_SIGNED_CERT_IN_CHAIN|E401|E403|E404|E5\d\d)\b")


class Unavailable(Exception):
    """Why the engines cannot be had here."""


def program(name):
    path = shutil.which(name)
    if path is None:
        raise Unavailable(f"there is no {name} in PATH (Debian's nodejs and npm, or node 20 from elsewhere)")
    return path


def node_version():
    text = subprocess.run([program("node"), "--version"], capture_output=True, text=True, check=True,
                          timeout=60).stdout
    return tuple(int(part) for part in text.strip().lstrip("v").split("."))


def wanted():
    digest = hashlib.sha256()
    for name in ("package.json", "package-lock.json"):
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()[:16]


def prune(modules):
    """Removes the binaries of other systems: two thirds of everything."""
    for system in modules.glob("onnxruntime-node/bin/*/*"):
        if system.name != "linux":
            shutil.rmtree(system)
    for kind in modules.glob("onnxruntime-node/bin/*/linux/*"):
        if kind.name != "x64":
            shutil.rmtree(kind)


def fetch(folder):
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / name, folder)
    done = subprocess.run(
        [program("npm"), "ci", "--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund",
         "--fetch-retries=1", "--fetch-retry-mintimeout=1000"],
        cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode != 0:
        lines = (done.stderr + done.stdout).strip().splitlines()
        if NO_REGISTRY.search(done.stderr):
            raise Unavailable(f"npm cannot have the packages: {lines[0] if lines else 'it does not say why'}")
        raise RuntimeError("npm ci failed:\n" + "\n".join(lines[:20]))
    prune(folder / "node_modules")


def node_modules():
    """The folder of the packages, installed if need be. Unavailable says why there is none."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise Unavailable(f"the engines' binaries are for Linux on x86_64, and this is {platform.machine()}")
    node_version()
    target = CACHE / wanted()
    if (target / "node_modules").is_dir():
        return target / "node_modules"
    if os.environ.get("MODELHOST_NO_INSTALL"):
        raise Unavailable("MODELHOST_NO_INSTALL is set, and build/engines does not have the packages")
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            for old in CACHE.iterdir():
                if old.is_dir():
                    shutil.rmtree(old)
            with tempfile.TemporaryDirectory(prefix="partial-", dir=CACHE) as partial:
                folder = pathlib.Path(partial) / "tree"
                folder.mkdir()
                try:
                    fetch(folder)
                except subprocess.TimeoutExpired:
                    raise Unavailable(f"npm had not fetched the packages after {LIMIT_S} s") from None
                folder.rename(target)
    return target / "node_modules"


if __name__ == "__main__":
    try:
        print(node_modules())
    except Unavailable as reason:
        print(reason)
        sys.exit(77)
