"""The Debian tree that the service tests boot: made once by mmdebstrap, kept by what is in it.

It has systemd, the run-time libraries that the programs name (the list of the Dockerfile's run
stage), and Python for the tests' clients; not the product, which goes into a copy of it.
"""
import fcntl
import hashlib
import os
import pathlib
import re
import shutil
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SUITE = "bookworm"
NEEDS = ("mmdebstrap", "systemd-nspawn", "nsenter", "unshare")
MAKE_DEADLINE_S = 600
NO_MIRROR = re.compile(r"resolve|unable to connect|could not connect|network is unreachable|timed out"
                       r"|no route|\b(403|404|502|503)\b", re.IGNORECASE)


class Unavailable(Exception):
    """Not to be had on this machine; the reason."""


def cache_folder(build):
    """Beside the build folder, unless MODELHOST_SERVICE_CACHE names a place for several clones."""
    place = os.environ.get("MODELHOST_SERVICE_CACHE")
    return pathlib.Path(place) if place else pathlib.Path(build).resolve().parent / "service"


def run_time_packages():
    """What the Dockerfile installs beside the programs."""
    stage = (ROOT / "Dockerfile").read_text().split("\nFROM ")[-1]
    listed = re.search(r"apt-get install -y --no-install-recommends((?:.|\n)+?)&&", stage).group(1)
    return [word for word in listed.split() if word != "\\"]


def packages():
    return sorted({"systemd", "python3", *run_time_packages()})


def cached_tree(cache):
    """The folder of the tree, made if it is not there yet. Raises Unavailable, or RuntimeError."""
    for name in NEEDS:
        if not shutil.which(name):
            raise Unavailable(f"there is no {name} (deploy/install-deps --test)")
    wanted = packages()
    key = hashlib.sha256("\n".join([SUITE, "1", *wanted]).encode()).hexdigest()[:16]
    cache.mkdir(parents=True, exist_ok=True)
    tree = cache / f"tree-{key}"
    with open(cache / "tree.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Two runs at once: one makes it.
        if not tree.exists():
            for old in cache.glob("tree-*"):
                shutil.rmtree(old)
            make(tree, wanted)
    return tree


def make(tree, wanted):
    partial = tree.with_name(tree.name + ".partial")
    log = tree.parent / "mmdebstrap.log"
    command = ["mmdebstrap", "--mode=root", "--format=directory", "--variant=essential",
               "--include=" + ",".join(wanted), '--aptopt=Acquire::Languages "none"',
               '--aptopt=Acquire::http::Timeout "20"', "--dpkgopt=force-unsafe-io"]
    command += [f"--dpkgopt=path-exclude=/usr/share/{name}/*"
                for name in ("doc", "man", "locale", "info")]
    # What it mounts goes with its mount namespace, however it ends.
    with open(log, "wb") as out:
        try:
            done = subprocess.run(["unshare", "--mount", *command, SUITE, str(partial)], stdout=out,
                                  stderr=out, stdin=subprocess.DEVNULL, check=False,
                                  timeout=MAKE_DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"mmdebstrap took more than {MAKE_DEADLINE_S} s") from None
    if done.returncode != 0:
        text = log.read_text(errors="replace")
        if NO_MIRROR.search(text):
            raise Unavailable(f"no package mirror can be reached ({log})")
        raise RuntimeError(f"mmdebstrap failed ({log}):\n{text[-2000:]}")
    os.rename(partial, tree)
