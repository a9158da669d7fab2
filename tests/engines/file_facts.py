"""What a program sees of one file: run under modelctl exec, prints one JSON object. Every entry is
"ok" or the name of the errno.

  file_facts.py PATH
"""
import errno
import fcntl
import hashlib
import json
import mmap
import os
import sys


def attempt(action):
    try:
        action()
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error.errno))
    return "ok"


def mapped(path, flags, protection, how=os.O_RDONLY):
    fd = os.open(path, how | os.O_CLOEXEC)
    try:
        with mmap.mmap(fd, 0, flags, protection) as memory:
            return hashlib.sha256(memory).hexdigest()
    finally:
        os.close(fd)


def with_open(path, how, action):
    fd = os.open(path, how | os.O_CLOEXEC)
    try:
        action(fd)
    finally:
        os.close(fd)


def seek_is_private(path):
    """Two opens of the path have two offsets, whatever others do with theirs."""
    with open(path, "rb") as one, open(path, "rb") as two:
        one.read(16)
        return os.lseek(two.fileno(), 0, os.SEEK_CUR) == 0


def lock_twice(path):
    """Locks are the file's, not the opener's: a second one has to wait for the first."""
    with open(path, "rb") as one, open(path, "rb") as two:
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)


def main():
    path = sys.argv[1]
    with open(path, "rb") as file:
        data = file.read()
    read, write = mmap.PROT_READ, mmap.PROT_WRITE
    facts = {
        "path": path,
        "sha256": hashlib.sha256(data).hexdigest(),
        "stat_size": os.stat(path).st_size == len(data),
        "map_shared": mapped(path, mmap.MAP_SHARED, read),
        "map_private": mapped(path, mmap.MAP_PRIVATE, read),
        # Copy on write: some engines map so, and change pages of their own.
        "map_private_writable": mapped(path, mmap.MAP_PRIVATE, read | write),
        "map_shared_writable": attempt(lambda: mapped(path, mmap.MAP_SHARED, read | write, os.O_RDWR)),
        "own_offset": seek_is_private(path),
        "open_rdwr": attempt(lambda: with_open(path, os.O_RDWR, lambda fd: None)),
        "write": attempt(lambda: with_open(path, os.O_RDWR, lambda fd: os.pwrite(fd, b"x", 0))),
        "truncate": attempt(lambda: with_open(path, os.O_RDWR, lambda fd: os.ftruncate(fd, 0))),
        "open_truncate": attempt(lambda: with_open(path, os.O_WRONLY | os.O_TRUNC, lambda fd: None)),
        "flock_shared": attempt(lambda: with_open(path, os.O_RDONLY, lambda fd: fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB))),
        "flock_exclusive": attempt(lambda: with_open(path, os.O_RDONLY, lambda fd: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB))),
        "flock_twice": attempt(lambda: lock_twice(path)),
        "lock_read": attempt(lambda: with_open(path, os.O_RDONLY, lambda fd: fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB))),
        "lock_write": attempt(lambda: with_open(path, os.O_RDONLY, lambda fd: fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB))),
        "realpath": attempt(lambda: os.path.realpath(path, strict=True)),
        "realpath_is": os.path.realpath(path),
        "no_follow": attempt(lambda: with_open(path, os.O_RDONLY | os.O_NOFOLLOW, lambda fd: None)),
        "direct": attempt(lambda: with_open(path, os.O_RDONLY | os.O_DIRECT, lambda fd: None)),
        "noatime": attempt(lambda: with_open(path, os.O_RDONLY | os.O_NOATIME, lambda fd: None)),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
