"""What views outlive, and what they cost: garbage, threads, fork, exit, leaks, pickling."""
import copy
import gc
import os
import pathlib
import pickle
import platform
import random
import sys
import textwrap
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import case  # noqa: E402
import harness  # noqa: E402
from case import need, wait_for  # noqa: E402


def state_of(thread):
    return pathlib.Path(f"/proc/self/task/{thread}/stat").read_text().split(") ")[1][0]


class Lifetimes(case.Case):
    def setUp(self):
        super().setUp()
        self.tensors = case.every_type()
        self.serve_tensors("planner", 1, self.tensors, files={"tokenizer.json": b'{"of": 1}'})

    def views_of(self, client, numpy):
        """Objects of every kind that hold a version, each with how to read its bytes."""
        handle = client.acquire("planner")
        tensor = handle["of.F32"]
        file = handle.file("tokenizer.json")
        weights, text = self.tensors["of.F32"][2], b'{"of": 1}'
        return [(client, None, None), (handle, lambda h: bytes(h["of.F32"].view_bytes()), weights),
                (tensor, lambda t: bytes(t.view_bytes()), weights), (memoryview(tensor), bytes, weights),
                (tensor.view_bytes(), bytes, weights), (numpy.asarray(tensor), lambda a: a.tobytes(), weights),
                (numpy.from_dlpack(tensor)[::1], lambda a: a.tobytes(), weights),
                (handle["of.BF16"].numpy(raw=True), lambda a: a.tobytes(), self.tensors["of.BF16"][2]),
                (tensor.__dlpack__(), None, None), (tensor.__dlpack__(max_version=(1, 0)), None, None),
                (file, bytes, text), (memoryview(file), bytes, text), (handle.items(), None, None),
                (handle.values(), None, None)]

    def test_whatever_is_freed_first_the_rest_can_be_read(self):
        numpy = need("numpy")
        order = random.Random(7)
        thresholds = gc.get_threshold()
        self.addCleanup(gc.set_threshold, *thresholds)
        gc.set_threshold(1, 1, 1)  # Collects at nearly every allocation.
        for _ in range(60):
            views = self.views_of(self.connect(keep=False), numpy)
            order.shuffle(views)
            while views:
                del views[-1]
                gc.collect(0)
                for view, read, expected in views:
                    if read is not None:
                        self.assertEqual(read(view), expected)
            view = None
        self.wait_leases(0)

    def test_a_handle_may_be_closed_by_a_destructor_while_it_is_listed(self):
        thresholds = gc.get_threshold()
        self.addCleanup(gc.set_threshold, *thresholds)

        class Closer:
            def __init__(self, handle):
                self.handle, self.me = handle, self

            def __del__(self):
                self.handle.close()

        client = self.connect()
        for what in (list, lambda h: list(h.items()), lambda h: h.files, lambda h: h.metadata,
                     lambda h: h.components):
            handle = client.acquire("planner")
            gc.collect()
            Closer(handle)
            gc.set_threshold(1, 1, 1)  # Collected, and so closed, within the call.
            try:
                what(handle)
            except self.modelhost.FailedPrecondition:
                pass  # It was collected before the call began.
            gc.set_threshold(*thresholds)
            gc.collect()
            self.assertTrue(handle.closed)

    def test_views_in_cycles_are_collected(self):
        numpy = need("numpy")
        gc.collect()
        for _ in range(50):
            box = [self.connect(keep=False).acquire("planner")]
            box.append(numpy.asarray(box[0]["of.F32"]))
            box.append(box)
            del box
        gc.collect()
        self.wait_leases(0)

    @harness.smoke
    def test_a_thousand_acquires_leave_nothing_behind(self):
        numpy = need("numpy")
        client = self.connect()

        def churn(times):
            for _ in range(times):
                handle = client.acquire("planner")
                views = [handle["of.F32"].numpy(), memoryview(handle["of.I64"]),
                         handle.file("tokenizer.json"), numpy.from_dlpack(handle["of.U8"]),
                         handle["of.F32"].__dlpack__(), list(handle.items()), handle.metadata]
                try:
                    handle["nowhere"]
                except KeyError:
                    pass
                if len(views) == 3:
                    self.fail("never")
            gc.collect()

        churn(50)
        wait_for("no lease", lambda: client.state().leases == 0)
        before = harness.footprint(os.getpid())
        blocks = sys.getallocatedblocks()
        churn(1000)
        wait_for("no lease", lambda: client.state().leases == 0)
        after = harness.footprint(os.getpid())
        for key in ("fds", "maps", "threads"):
            self.assertLessEqual(after[key], before[key] + (2 if key == "maps" else 0), key)
        self.assertLess(sys.getallocatedblocks() - blocks, 500)
        self.assertLess(after["anonymous"] - before["anonymous"], 4 << 20)
        self.wait_leases(0)

    def test_reference_counts_are_as_before(self):
        handle = self.connect().acquire("planner")
        tensor = handle["of.F32"]
        before = sys.getrefcount(tensor)
        for _ in range(100):
            memoryview(tensor)
            tensor.view_bytes()
            tensor.__dlpack__()
            repr(tensor)
            for refused in (lambda: handle["of.BF16"].__array_interface__, lambda: pickle.dumps(tensor),
                            lambda: memoryview(handle["of.BF16"]), lambda: handle["x"]):
                try:
                    refused()
                except (AttributeError, TypeError, BufferError, KeyError):
                    pass
        self.assertEqual(sys.getrefcount(tensor), before)

    def test_a_thousand_handles_at_once(self):
        client = self.connect()
        before = harness.footprint(os.getpid())
        handles = [client.acquire("planner") for _ in range(1000)]
        self.assertEqual(client.state().leases, 1000)
        self.assertEqual({bytes(handle["of.U8"]) for handle in handles}, {self.tensors["of.U8"][2]})
        self.assertLess(harness.footprint(os.getpid())["fds"] - before["fds"], 10)
        del handles
        wait_for("no lease", lambda: client.state().leases == 0)

    def test_too_many_descriptors_is_an_error_that_says_so(self):
        out = self.script("""
            import os
            client = modelhost.connect(runtime)
            held = []
            try:
                while True:
                    held.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                pass
            try:
                client.acquire("planner")
            except modelhost.ResourceExhausted as error:
                print(error)
            for fd in held:
                os.close(fd)
            print(client.acquire("planner").version)
        """, limits={"RLIMIT_NOFILE": 64})
        self.assertIn("RLIMIT_NOFILE", out)
        self.assertTrue(out.endswith("\n1\n"))

    def test_pickling_and_copying_are_refused_with_what_to_do(self):
        client = self.connect()
        handle = client.acquire("planner")
        live = client.follow("planner")
        for thing in (client, handle, handle["of.F32"], handle.file("tokenizer.json"), live):
            for refused in (pickle.dumps, copy.copy, copy.deepcopy):
                with self.subTest(f"{refused.__name__} {type(thing).__name__}"):
                    with self.assertRaisesRegex(TypeError, "cannot pickle.*[(]"):
                        refused(thing)
        live.close()
        for error in (self.modelhost.NotFound("x"), self.modelhost.Unavailable("y")):
            again = pickle.loads(pickle.dumps(error))
            self.assertEqual((type(again), str(again)), (type(error), str(error)))

    def test_threads_share_a_handle(self):
        handle = self.connect().acquire("planner")
        expected = {name: data for name, (_, _, data) in self.tensors.items()}
        wrong = []

        def read(seed):
            order = random.Random(seed)
            for _ in range(300):
                name = order.choice(sorted(expected))
                if bytes(handle[name].view_bytes()) != expected[name]:
                    wrong.append(name)
                if bytes(handle.file("tokenizer.json")) != b'{"of": 1}':
                    wrong.append("file")

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])

    def test_threads_may_use_a_client_while_another_closes_it(self):
        for _ in range(20):
            client = self.connect()
            outcomes = []

            def use():
                try:
                    for _ in range(10_000):
                        client.acquire("planner")
                except self.modelhost.FailedPrecondition as error:
                    outcomes.append(str(error))

            threads = [threading.Thread(target=use) for _ in range(3)]
            for thread in threads:
                thread.start()
            client.acquire("planner")
            client.close()
            for thread in threads:
                thread.join()
            self.assertEqual(len(outcomes), 3)
        self.wait_leases(0)

    def test_closing_a_client_ends_calls_of_other_threads_and_all_leases(self):
        def closed_while_waiting():
            client = self.connect()
            handle = client.acquire("planner")
            errors = []

            def wait():
                try:
                    client.acquire("planner@2", wait=True, timeout=3600)
                except self.modelhost.FailedPrecondition as error:
                    errors.append(str(error))

            waiter = threading.Thread(target=wait)
            waiter.start()
            wait_for("a thread that sleeps", lambda: state_of(waiter.native_id) == "S")
            client.close()
            waiter.join(harness.DEADLINE_S)
            self.assertFalse(waiter.is_alive())
            self.wait_leases(0)
            with self.assertRaises(self.modelhost.FailedPrecondition):
                handle.file("tokenizer.json")
            (error,) = errors
            return "planner@2: the client was disconnected" in error  # It was within the call.

        wait_for("a call that was closed while it waited", closed_while_waiting)

    def test_a_signal_handler_may_end_a_wait(self):
        for call in ('client.acquire("planner@2", wait=True, timeout=3600)',
                     'client.acquire_set(["planner@2"], wait=True, timeout=3600)',
                     'client.follow("planner@2", wait=True, timeout=3600)',
                     'modelhost.connect("/nowhere", timeout=3600)'):
            with self.subTest(call):
                out = self.script(f'''
                    import os, signal, threading
                    client = modelhost.connect(runtime)
                    main = threading.main_thread().native_id
                    def interrupt():  # When the main thread waits.
                        while open(f"/proc/self/task/{{main}}/stat").read().split(") ")[1][0] != "S":
                            pass
                        os.kill(os.getpid(), signal.SIGINT)
                    signal.signal(signal.SIGALRM, lambda *_: print("alarm"))
                    signal.setitimer(signal.ITIMER_REAL, 0.05)
                    threading.Timer(0.3, interrupt).start()
                    try:
                        {call}
                    except KeyboardInterrupt:
                        print("interrupted")
                    print(client.acquire("planner").version)
                ''')
                self.assertEqual(out.split(), ["alarm", "interrupted", "1"])

    def test_a_client_that_is_garbage_ends_without_a_collector(self):
        gc.collect()
        gc.disable()
        self.addCleanup(gc.enable)
        before = harness.footprint(os.getpid())["fds"]
        for _ in range(10):
            self.connect(keep=False).acquire("planner")
        self.wait_leases(0)
        wait_for("no socket", lambda: harness.footprint(os.getpid())["fds"] <= before + 2)

    def test_dropping_the_last_view_does_not_unmap_in_the_thread_that_drops_it(self):
        if platform.machine() not in ("x86_64", "aarch64"):
            self.skipTest(f"the number of munmap on {platform.machine()}")
        self.script("""
            import ctypes, platform, struct, time
            tensor = modelhost.connect(runtime).acquire("planner")["of.F32"]
            assert tensor.view_bytes()[0] is not None
            (files,) = {line.split()[5] for line in open("/proc/self/maps") if "model.safetensors" in line}

            # From here munmap fails in this thread, and in no other that there is.
            munmap = {"x86_64": 11, "aarch64": 215}[platform.machine()]
            filter = b"".join(struct.pack("=HBBI", *instruction) for instruction in (
                (0x20, 0, 0, 0),           # A = the number of the system call
                (0x15, 0, 1, munmap),      # if A == munmap
                (0x06, 0, 0, 0x00050001),  #   EPERM
                (0x06, 0, 0, 0x7fff0000),  # allow
            ))
            kept = ctypes.create_string_buffer(filter, len(filter))
            program = struct.pack("@HP", len(filter) // 8, ctypes.addressof(kept))
            libc = ctypes.CDLL(None, use_errno=True)
            zero = ctypes.c_ulong(0)
            assert libc.prctl(38, ctypes.c_ulong(1), zero, zero, zero) == 0  # PR_SET_NO_NEW_PRIVS
            assert libc.prctl(22, ctypes.c_ulong(2), program, zero, zero) == 0  # PR_SET_SECCOMP
            page = libc.mmap
            page.restype = ctypes.c_void_p
            address = page(None, ctypes.c_size_t(4096), 1, 0x22, -1, zero)
            assert libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(4096)) == -1
            assert ctypes.get_errno() == 1

            del tensor
            end = time.monotonic() + 60
            while files in open("/proc/self/maps").read():
                assert time.monotonic() < end, "it is mapped still"
        """)
        self.wait_leases(0)

    def test_a_forked_child_reads_on_and_connects_for_itself(self):
        out = self.script("""
            import os
            client = modelhost.connect(runtime)
            handle = client.acquire("planner")
            tensor = handle["of.U8"]
            before = bytes(tensor)
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    assert bytes(tensor) == before
                    assert bytes(handle["of.I32"].view_bytes())
                    for call in (lambda: client.acquire("planner"), lambda: handle.file("tokenizer.json"),
                                 client.fileno):
                        try:
                            call()
                        except modelhost.FailedPrecondition as error:
                            assert "fork" in str(error), error
                        else:
                            raise AssertionError("the session is the parent's")
                    own = modelhost.connect(runtime).acquire("planner")
                    assert bytes(own["of.U8"]) == before
                    del handle, tensor, client, own
                    status = 0
                finally:
                    sys.stderr.flush()
                    os._exit(status)
            assert os.waitpid(child, 0)[1] == 0
            assert bytes(client.acquire("planner")["of.U8"]) == before
            print(client.state().leases)
        """)
        self.assertIn(out, ("1\n", "2\n"))

    def test_a_forked_child_that_ends_as_python_does_leaves_the_parents_lease(self):
        self.script("""
            import os
            client = modelhost.connect(runtime)
            handle = client.acquire("planner")
            child = os.fork()
            if child == 0:
                sys.exit(0)
            assert os.waitpid(child, 0)[1] == 0
            assert client.state().leases == 1
            assert bytes(handle.file("tokenizer.json")) == b'{"of": 1}'
        """)

    EXITS = {
        "globals": "keep = everything()",
        "a cycle": "keep = everything()\nkeep.append(keep)",
        "a module that goes last": "import builtins\nbuiltins.keep = everything()",
        "atexit": "import atexit\nkeep = everything()\natexit.register(lambda: print(len(keep)))",
        "a daemon thread that reads": """
            import threading
            keep = everything()
            started = threading.Event()
            def read():
                while True:
                    bytes(keep[2].view_bytes())
                    started.set()
            threading.Thread(target=read, daemon=True).start()
            started.wait()
            """,
        "a daemon thread that waits": """
            import threading
            client = modelhost.connect(runtime)
            started = threading.Event()
            def wait():
                started.set()
                client.acquire("planner@99", wait=True, timeout=60)
            threading.Thread(target=wait, daemon=True).start()
            started.wait()
            """,
        "an exception": "keep = everything()\nraise SystemExit(0)",
        "a destructor": """
            class Late:
                def __init__(self):
                    self.keep = everything()
                def __del__(self):
                    bytes(self.keep[2].view_bytes())
            late = Late()
            """,
    }

    # Each in threads that go on while the interpreter ends: with and without the GIL, and in Python.
    LOOPS = {
        "acquire": 'client.acquire("planner")',
        "an acquire that fails": '''
            try:
                client.acquire("nowhere")
            except modelhost.NotFound:
                pass
            ''',
        "file": 'handle.file("tokenizer.json")',
        "resolve": 'client.resolve("planner")',
        "fileno": "client.fileno()",
        "copies": 'handle["of.F32"].__dlpack__(copy=True)',
        "state_and_adopt": "live.adopt(), client.state()",
    }

    def test_the_interpreter_may_end_while_threads_are_in_calls(self):
        for what, call in self.LOOPS.items():
            with self.subTest(what):
                self.script(textwrap.dedent('''
                    import threading
                    client = modelhost.connect(runtime)
                    handle, live = client.acquire("planner"), client.follow("planner")
                    started = [threading.Event() for _ in range(4)]
                    def loop(event):
                        while True:
                            call()
                            event.set()
                    def call():
                    ''') + textwrap.indent(textwrap.dedent(call), "    ") + textwrap.dedent('''
                    for event in started:
                        threading.Thread(target=loop, args=(event,), daemon=True).start()
                    for event in started:
                        event.wait()
                    '''))
        self.wait_leases(0)

    def test_the_interpreter_may_end_with_live_views(self):
        need("numpy")
        for what, ending in self.EXITS.items():
            with self.subTest(what):
                self.script(textwrap.dedent("""
                    import numpy
                    def everything():
                        client = modelhost.connect(runtime)
                        live = client.follow("planner")
                        handle = client.acquire("planner")
                        tensor = handle["of.F32"]
                        client.fileno()
                        return [client, handle, tensor, memoryview(tensor), tensor.numpy(),
                                numpy.from_dlpack(tensor), tensor.__dlpack__(max_version=(1, 0)),
                                handle.file("tokenizer.json"), live, live.current]
                    """) + textwrap.dedent(ending))
        self.wait_leases(0)
