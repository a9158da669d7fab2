"""systemd's fd store, played by the test: it keeps what a daemon stores, and gives it to the next."""
import array
import fcntl
import os
import select
import socket
import subprocess
import sys
import threading

import harness

# As systemd does: descriptors from 3 on, LISTEN_PID of the very process that will be the daemon.
_LAUNCHER = """
import fcntl, os, sys
fds = [int(fd) for fd in sys.argv[1].split(",") if fd]
high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 4096) for fd in fds]
os.closerange(3, 4096)
for number, fd in enumerate(high, 3):
    os.dup2(fd, number, inheritable=True)
if fds:
    os.environ["LISTEN_PID"] = str(os.getpid())
    os.environ["LISTEN_FDS"] = str(len(fds))
    os.environ["LISTEN_FDNAMES"] = sys.argv[2]
os.execv(sys.argv[3], sys.argv[3:])
"""


class FdKeeper:
    """The notify socket of a service and its store. Read all the time, as systemd does."""

    def __init__(self, path, most=4096):
        self.path, self.most = str(path), most
        self.messages = []
        self.stored = []  # (name, fd), oldest first.
        self.count = 0    # Of messages about the store since the last start.
        self.on_message = None
        self.lock = threading.Lock()
        self._end = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        os.chmod(self.path, 0o666)
        self._socket.setblocking(False)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self):
        while not self._end.is_set():
            select.select([self._socket], [], [], 0.1)
            with self.lock:
                self.take_all()

    def take_all(self):
        """What was sent before, as systemd does before it looks at who ended. Under the lock."""
        while True:
            try:
                text, fds = self._receive()
            except BlockingIOError:
                return
            self._take(text.split("\n"), fds)

    def _receive(self):
        numbers = array.array("i")
        data, ancillary, _, _ = self._socket.recvmsg(
            8192, socket.CMSG_LEN(16 * numbers.itemsize), socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers.frombytes(content[:len(content) - len(content) % numbers.itemsize])
        return data.decode(), list(numbers)

    def _take(self, lines, fds):
        values = dict(line.split("=", 1) for line in lines if "=" in line)
        name = values.get("FDNAME", "stored")
        self.messages += lines
        if values.get("FDSTOREREMOVE") == "1":
            for _, fd in [each for each in self.stored if each[0] == name]:
                os.close(fd)
            self.stored = [each for each in self.stored if each[0] != name]
        elif values.get("FDSTORE") == "1":
            for fd in fds:
                if len(self.stored) < self.most:
                    self.stored.append((name, fd))
                else:
                    os.close(fd)
            fds = []
        for fd in fds:
            os.close(fd)
        if "FDSTORE" in values or "FDSTOREREMOVE" in values:
            self.count += 1
            if self.on_message is not None:
                self.on_message(self.count)

    def names(self):
        with self.lock:
            self.take_all()
            return [name for name, _ in self.stored]

    def inode(self, name):
        with self.lock:
            return os.fstat(dict(self.stored)[name]).st_ino

    def put(self, name, fd):
        """As if a daemon had stored it."""
        with self.lock:
            self.stored.append((name, fd))

    def replace(self, name, fd):
        with self.lock:
            self.stored = [(each, fd if each == name else kept) for each, kept in self.stored]

    def swap(self, one, other):
        with self.lock:
            names = {one: other, other: one}
            self.stored = [(names.get(name, name), fd) for name, fd in self.stored]

    def forget(self):
        """As `systemctl stop` does."""
        with self.lock:
            for _, fd in self.stored:
                os.close(fd)
            self.stored = []

    def close(self):
        self._end.set()
        self._thread.join()
        self._socket.close()
        self.forget()


class KeptDaemon(harness.Daemon):
    """A daemon whose service manager has an fd store, which outlives it."""

    def __init__(self, folder, most=4096, sockets=False, **options):
        super().__init__(folder, wait=False, **options)
        self.sockets = self._listen() if sockets else []
        self.keeper = FdKeeper(self.folder / "notify.sock", most)
        self.notify = self.keeper

    def start(self, wait_ready=True, user=None):
        keeper = self.keeper
        self.told_to_end, self.exit_code = False, None
        with keeper.lock:
            keeper.take_all()
            keeper.messages, keeper.count = [], 0
            # Sockets come first.
            given = [(name, each.fileno()) for name, each in self.sockets] + keeper.stored
            fds = [fd for _, fd in given]
            names = ":".join(name for name, _ in given)
            with open(self.log, "ab") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-B", "-S", "-c", _LAUNCHER, ",".join(map(str, fds)), names,
                     *self.command()], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    env=harness.environment(NOTIFY_SOCKET=keeper.path, **self.env), cwd="/",
                    pass_fds=fds, preexec_fn=harness.end_with_us,
                    **harness.as_user(harness.DAEMON if user is None else user))
        if wait_ready:
            self.wait_ready()
        return self

    def _listen(self):
        """The socket units: they listen whether or not there is a daemon."""
        made = []
        for name, kind in (("control", socket.SOCK_STREAM), ("handles", socket.SOCK_SEQPACKET)):
            listener = socket.socket(socket.AF_UNIX, kind)
            path = self.runtime / f"{name}.sock"
            listener.bind(str(path))
            path.chmod(0o666)
            listener.listen(128)
            made.append((name, listener))
        return made

    def close(self):
        self.keeper.close()
        for _, listener in self.sockets:
            listener.close()

    def kill(self):
        self.check_alive()
        self.told_to_end = True
        self.process.kill()
        self.process.wait()

    def stop(self, deadline_s=None):
        keeper, self.notify = self.notify, _NothingToClose()
        try:
            return super().stop(deadline_s)
        finally:
            self.notify = keeper

    def io(self):
        """What /proc says that it has read and written since it began."""
        with open(f"/proc/{self.process.pid}/io") as file:
            return {key: int(value) for key, value in
                    (line.split(":") for line in file.read().splitlines())}


class _NothingToClose:
    messages = ()

    def close(self):
        pass


def memory(nbytes, seals=True, fill=b"\0"):
    """A memfd, as somebody else might have stored it."""
    fd = os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, fill * nbytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK |
                    fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    return fd
