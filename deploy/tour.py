#!/usr/bin/env python3
"""A model's life with modelhost, measured; see deploy/quickstart. Standard library only."""
import argparse
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
MIB = 1 << 20
READERS = 8


class Failure(Exception):
    pass


def say(text):
    bold = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print(f"\n\033[1m{text}\033[0m" if bold else f"\n== {text}", file=sys.stderr, flush=True)


def ms(seconds):
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else (
        f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s")


class Tour:
    def __init__(self, build):
        self.bin = build / "bin"
        self.env = {**os.environ, "LD_LIBRARY_PATH": str(build / "lib")}
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="modelhost-quickstart-"))
        self.runtime = self.folder / "run"
        self.started = []
        self.table = []

    def row(self, what, value, note=""):
        self.table.append((what, value, note))

    # --- processes

    def start(self, name, command, **options):
        """Starts a program whose end is ours to see to; its output goes to a log."""
        with open(self.folder / f"{name}.log", "ab") as log:
            options.setdefault("stdout", log)
            options.setdefault("stdin", subprocess.DEVNULL)
            process = subprocess.Popen([str(part) for part in command], stderr=log, env={
                **self.env, **options.pop("env", {})}, **options)
        self.started.append((name, process))
        return process

    def log_tail(self, name, lines=15):
        path = self.folder / f"{name}.log"
        text = path.read_text(errors="replace") if path.exists() else ""
        return "\n".join("    | " + line for line in text.splitlines()[-lines:])

    def stop(self, process):
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdout:
            process.stdout.close()
        if process.stdin:
            process.stdin.close()

    def close(self):
        for _, process in reversed(self.started):
            self.stop(process)
        if os.environ.get("QUICKSTART_KEEP"):
            print(f"kept: {self.folder}", file=sys.stderr)
            return
        for path in [self.folder, *self.folder.rglob("*")]:
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)  # Versions in the store are closed to writing.
        shutil.rmtree(self.folder, ignore_errors=True)

    def daemon(self):
        """Starts modelhostd and waits until it says that it is ready, as it says to systemd."""
        self.runtime.mkdir(mode=0o700)
        notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notify.bind(str(self.folder / "notify.sock"))
        notify.settimeout(0.5)
        process = self.start("modelhostd", [
            self.bin / "modelhostd", "--store", self.folder / "store", "--state",
            self.folder / "state", "--runtime-dir", self.runtime, "--metrics", "off"],
            env={"NOTIFY_SOCKET": str(self.folder / "notify.sock")})
        end = time.monotonic() + 30
        with notify:
            while True:
                try:
                    if b"READY=1" in notify.recv(4096):
                        return process
                except TimeoutError:
                    pass
                if process.poll() is not None:
                    raise Failure("modelhostd ended at its start:\n" + self.log_tail("modelhostd"))
                if time.monotonic() > end:
                    raise Failure("modelhostd is not ready after 30 s:\n" +
                                  self.log_tail("modelhostd"))

    def ctl(self, *arguments):
        """Runs a verb, shown as a user would type it; its answer as JSON."""
        words = [str(argument) for argument in arguments]
        print("  $ modelctl " + " ".join(words), file=sys.stderr, flush=True)
        done = subprocess.run([str(self.bin / "modelctl"), "--runtime-dir", str(self.runtime), "-o",
                               "json", "--progress", "none", *words], capture_output=True, text=True,
                              env=self.env, stdin=subprocess.DEVNULL, timeout=600, check=False)
        if done.returncode != 0:
            raise Failure(f"`modelctl {' '.join(words)}` ended with {done.returncode}:\n"
                          f"    | {done.stderr.strip()}\nthe daemon's last words:\n" +
                          self.log_tail("modelhostd"))
        return json.loads(done.stdout) if done.stdout.strip() else {}

    # --- the steps

    def make(self, *arguments):
        subprocess.run([sys.executable, "-B", str(HERE / "make_model.py"), *map(str, arguments)],
                       check=True)

    def publish(self, folder, model, version):
        started = time.monotonic()
        answer = self.ctl("publish", folder, "--model", model, "--version", version)
        return answer, time.monotonic() - started

    def last_load(self, ref):
        return self.ctl("describe", ref)["version"]["lastLoad"]

    def forget(self, model, version):
        """Takes a version's files out of the page cache: the next load is a cold one."""
        for path in (self.folder / "store/models" / model / "versions" / str(version)).iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def readers(self, ref):
        """Eight processes that have read every byte; their memory, and how long attaching took."""
        crowd = []
        for number in range(READERS):
            crowd.append(self.start(f"reader-{number}", [
                self.bin / "modelhost-reader", "--runtime-dir", self.runtime, "--ref", ref, "--json",
                "--checksum", "--pss", "--hold-stdin"], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, text=True))
        answers = []
        for number, process in enumerate(crowd):
            answer = {}
            while answer.get("kind") != "memory":  # The last line before it waits.
                line = process.stdout.readline()
                if not line:
                    raise Failure(f"a reader ended with {process.wait()}:\n" +
                                  self.log_tail(f"reader-{number}"))
                answer = {**answer, **json.loads(line)}
            answers.append(answer)
        memory = [self.pss(process.pid) for process in crowd]
        daemon = self.pss(self.started[0][1].pid)
        for process in crowd:
            process.stdin.close()
            process.wait(30)
        return answers, sum(memory) + daemon

    def attach(self, ref):
        """From connecting to the first tensor's pointer, many times in a process of its own."""
        done = subprocess.run([str(self.bin / "modelhost-reader"), "--runtime-dir",
                               str(self.runtime), "--ref", ref, "--attach", "500", "--json"],
                              capture_output=True, text=True, env=self.env, timeout=120, check=False)
        if done.returncode != 0:
            raise Failure(f"modelhost-reader ended with {done.returncode}: {done.stderr.strip()}")
        return json.loads(done.stdout)

    @staticmethod
    def pss(pid):
        for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
        return 0

    def wait_adopted(self, names, version):
        """Until the nodes say that they use `version`."""
        end = time.monotonic() + 20
        for name in names:
            while f"planner@{version}" not in (self.folder / f"{name}.log").read_text():
                for started, process in self.started:
                    if started == name and process.poll() is not None:
                        raise Failure(f"{name} ended with {process.returncode}:\n" +
                                      self.log_tail(name))
                if time.monotonic() > end:
                    raise Failure(f"{name} does not adopt version {version}:\n" +
                                  self.log_tail(name))
                time.sleep(0.01)

    def run(self):
        mib = int(os.environ.get("QUICKSTART_MIB", "256"))
        say(f"Models to serve: a transformer of about {mib} MiB in 4 shards, and a GGUF file")
        self.make("safetensors", self.folder / "planner-v1", "--mib", mib, "--seed", "one")
        self.make("safetensors", self.folder / "planner-v2", "--mib", mib, "--seed", "one",
                  "--last-seed", "two")
        self.make("gguf", self.folder / "speech.gguf", "--mib", max(8, mib // 4))

        say("A daemon, as this user, with nothing configured")
        self.daemon()
        status = self.ctl("status")
        print(f"  modelhostd {status['version']}, ready, pid {status['pid']}", file=sys.stderr)

        say("A small model first: one GGUF file")
        answer, took = self.publish(self.folder / "speech.gguf", "speech", 1)
        self.ctl("swap", "speech", "--version", 1)
        row = self.ctl("describe", "speech")["version"]
        self.row("publish speech.gguf", ms(took), f"{row['format']}, {row['tensorCount']} tensors, "
                 f"{row['state']}")
        # What the daemon has by now is not the next model's.
        idle = self.pss(status["pid"])

        say("Publish version 1 of a large one, load it from disk, label it stable")
        answer, took = self.publish(self.folder / "planner-v1", "planner", 1)
        size = answer["bytes"]
        self.row("publish planner@1", ms(took), f"{size / MIB:.0f} MiB, hashed and made durable")
        self.forget("planner", 1)
        self.ctl("swap", "planner", "--version", 1)
        load = self.last_load("planner@1")
        self.row("cold load, verified", ms(load["durationSeconds"]),
                 f"{size / load['durationSeconds'] / 1e9:.2f} GB/s")
        for phase in load["phases"]:
            self.row(f"  {phase['name']}", ms(phase["durationSeconds"]))

        say(f"{READERS} processes read every byte of it")
        answers, memory = self.readers("planner")
        sums = {answer["checksum"] for answer in answers}
        if len(sums) != 1:
            raise Failure(f"the readers read different bytes: {sums}")
        attach = self.attach("planner")
        self.row("attach, to the first tensor", f"{attach['p50_us']:.1f} us",
                 f"p50 of {attach['count']:.0f} with {answers[0]['tensors']:.0f} tensors; "
                 f"p99 {attach['p99_us']:.1f} us")
        self.row(f"memory of {READERS} processes", f"{(memory - idle) / MIB:.0f} MiB",
                 f"{(memory - idle) / size:.2f} x the file; copies of their own would be "
                 f"{READERS * size / MIB:.0f} MiB")

        say("Perception and planning nodes run; version 2 is published and takes over under them")
        nodes = ["modelhost-perception", "modelhost-planning"]
        for name in nodes:
            self.start(name, ["stdbuf", "-oL", self.bin / name, "--runtime-dir", self.runtime,
                              "--model", "planner", "--loops", 1000000])
        self.wait_adopted(nodes, 1)
        answer, took = self.publish(self.folder / "planner-v2", "planner", 2)
        self.row("publish planner@2", ms(took),
                 f"{answer['linkedBytes'] / MIB:.0f} of {answer['bytes'] / MIB:.0f} MiB were there "
                 "already")
        swap = self.ctl("swap", "planner", "--version", 2)
        self.wait_adopted(nodes, 2)
        load = self.last_load("planner@2")
        self.row("swap 1 -> 2", ms(swap["loadSeconds"]),
                 f"{load['diskBytes'] / MIB:.0f} MiB read, {load['sharedBytes'] / MIB:.0f} MiB shared "
                 "with version 1")
        self.row("  flip", ms(swap["flipSeconds"]), "both nodes have adopted it")

        say("Something is wrong with it: back to version 1")
        started = time.monotonic()
        self.ctl("rollback", "planner")
        self.row("rollback 2 -> 1", ms(time.monotonic() - started), "the whole command")
        if self.ctl("label", "ls", "planner")["items"][0]["version"] != 1:
            raise Failure("the label did not come back to version 1")
        for name, process in self.started:
            if process.poll() is not None and name in nodes:
                raise Failure(f"{name} ended with {process.returncode}:\n" + self.log_tail(name))

    def print_table(self):
        width = max(len(row[0]) for row in self.table)
        values = max(len(row[1]) for row in self.table)
        print()
        for what, value, note in self.table:
            print(f"{what:<{width}}  {value:>{values}}  {note}".rstrip())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=pathlib.Path, default=HERE.parent / "build/release")
    arguments = parser.parse_args()
    for name in ("modelhostd", "modelctl", "modelhost-reader", "modelhost-perception",
                 "modelhost-planning"):
        if not (arguments.build / "bin" / name).is_file():
            print(f"error: {arguments.build / 'bin' / name} is not built (deploy/quickstart builds it)",
                  file=sys.stderr)
            return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    tour = Tour(arguments.build.resolve())
    try:
        tour.run()
        tour.print_table()
        return 0
    except Failure as failure:
        print(f"quickstart: error: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        tour.close()


if __name__ == "__main__":
    sys.exit(main())
