"""Which files belong to the project: what git tracks, and new files that it does not ignore.

Without git (an unpacked archive, a container build) the tree is walked instead.
"""
import pathlib
import subprocess

IGNORED_FOLDERS = {".git", "build", ".cache", "__pycache__"}
CXX_SUFFIXES = {".h", ".cc", ".hpp", ".cu"}


def project_files(root):
    """Paths relative to `root`, sorted, of files that are there."""
    listing = subprocess.run(
        ["git", "-c", "safe.directory=*", "-C", str(root), "ls-files", "-z", "--cached", "--others",
         "--exclude-standard"], capture_output=True, check=False)
    if listing.returncode == 0:
        names = [name for name in listing.stdout.decode().split("\0") if name]
        top = subprocess.run(["git", "-c", "safe.directory=*", "-C", str(root), "rev-parse",
                              "--show-toplevel"], capture_output=True, check=False)
        if pathlib.Path(top.stdout.decode().strip()) == pathlib.Path(root).resolve():
            return sorted({name for name in names if (root / name).is_file()})
    found = []
    for path in root.rglob("*"):
        relative = path.relative_to(root)
        if path.is_file() and not IGNORED_FOLDERS.intersection(relative.parts):
            found.append(relative.as_posix())
    return sorted(found)


def cxx_files(root):
    return [name for name in project_files(root) if pathlib.PurePath(name).suffix in CXX_SUFFIXES]
