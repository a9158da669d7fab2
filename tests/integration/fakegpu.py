"""GPUs for daemons of tests: the fake driver (tests/fakes/fakecuda), and what is on them by its own books."""
import os
import pathlib

import harness


def environment(machine, **more):
    """For a process that finds the fake driver. Those of one `machine` share its GPUs."""
    programs = harness.PROGRAMS
    return {"LD_LIBRARY_PATH": f"{programs.lib}:{programs.fake_cuda}", "FAKECUDA_MACHINE": machine, **more}


def segments(machine, gpu=0):
    """How many segments of device memory somebody holds, counted once over all processes."""
    wanted = f"/memfd:fakecuda-gpu{gpu}-{machine} (deleted)"
    inodes = set()
    for process in pathlib.Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            for fd in (process / "fd").iterdir():
                if os.readlink(fd) == wanted:
                    inodes.add(os.stat(fd).st_ino)
        except OSError:  # It has ended, or is somebody else's.
            continue
    return len(inodes)
