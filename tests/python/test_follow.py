"""Following labels from Python: adopting, sets, events, asyncio; and a daemon that goes away."""
import asyncio
import os
import pathlib
import select
import sys
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import case  # noqa: E402
import harness  # noqa: E402
import models  # noqa: E402
from case import wait_for  # noqa: E402


def seed_of(handle):
    (seed,) = set.union(*[models.seeds_in(tensor) for tensor in handle.values()])
    return seed


class Follow(case.Case):
    def two_versions(self, model="planner"):
        self.serve(model, 1)
        self.publish(model, 2)

    def swap(self, version, model="planner"):
        self.ctl("swap", model, "--version", version)

    @harness.smoke
    def test_a_newer_version_is_adopted_when_asked_and_the_old_one_stays_as_long_as_it_is_kept(self):
        self.two_versions()
        live = self.connect().follow("planner")
        first = live.adopt()
        self.assertIs(live.adopt(), first)
        self.assertIs(live.current, first)
        old = memoryview(first["layer.0.weight"])
        self.swap(2)
        self.assertTrue(first.superseded)
        self.assertEqual(live.current.version, 1)
        second = wait_for("the newer version", lambda: live.adopt() is not first and live.adopt())
        self.assertEqual((second.version, seed_of(second)), (2, 2))
        self.assertIs(live.adopt(), second)
        self.assertIs(live.current, second)
        self.assertIsNone(live.error)
        self.assertEqual(models.seeds_in(old), {1})
        self.assertEqual(seed_of(first), 1)
        live.close()
        self.assertEqual(seed_of(second), 2)
        with self.assertRaisesRegex(self.modelhost.FailedPrecondition, "closed"):
            live.adopt()
        live.close()

    def test_a_handle_that_was_closed_is_made_anew_by_adopt(self):
        self.two_versions()
        with self.connect().follow("planner") as live:
            live.adopt().close()
            self.assertEqual(seed_of(live.adopt()), 1)

    def test_what_nobody_keeps_is_given_back(self):
        self.two_versions()
        live = self.connect().follow("planner")
        live.adopt()
        self.swap(2)
        wait_for("the newer version", lambda: live.adopt().version == 2)
        self.wait_leases(1)
        live.close()
        del live
        self.wait_leases(0)

    def test_models_that_belong_together_change_together(self):
        for model in ("a", "b"):
            self.two_versions(model)
        live = self.connect().follow_set(["a", "b"])
        first = live.adopt()
        self.assertEqual([handle.version for handle in first], [1, 1])
        self.assertIs(live.adopt(), first)
        self.ctl("swap", "a", "--version", 2, "--set", "b=2")
        second = wait_for("the newer set", lambda: live.adopt() is not first and live.adopt())
        self.assertEqual([(handle.version, seed_of(handle)) for handle in second], [(2, 2), (2, 2)])
        self.swap(1, "b")
        third = wait_for("the newest set", lambda: live.adopt() is not second and live.adopt())
        self.assertEqual([handle.version for handle in third], [2, 1])
        self.assertIs(third[0], second[0])
        self.assertEqual([seed_of(handle) for handle in first], [1, 1])
        self.assertIs(live.current, third)
        self.assertIsNone(live.error)
        live.close()
        with self.assertRaises(self.modelhost.FailedPrecondition):
            live.adopt()

    def test_events_wake_whoever_polls(self):
        self.two_versions()
        client = self.connect()
        handle = client.acquire("planner")
        client.clear_events()
        self.swap(2)
        ready, _, _ = select.select([client], [], [], harness.DEADLINE_S)
        self.assertEqual(ready, [client])
        wait_for("the label", lambda: handle.superseded)

    def test_a_task_of_asyncio_waits_for_changes(self):
        self.two_versions()
        client = self.connect()
        live = client.follow("planner")

        async def follow():
            while live.adopt().version != 2:
                await client.changed()
            return live.current

        async def both():
            tasks = [asyncio.create_task(follow()) for _ in range(3)]
            given_up = asyncio.create_task(client.changed())
            await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.get_running_loop().run_in_executor(None, self.swap, 2)
            return await asyncio.wait_for(asyncio.gather(*tasks), harness.DEADLINE_S)

        self.assertEqual([handle.version for handle in asyncio.run(both())], [2, 2, 2])

        def quiet():
            if not select.select([client], [], [], 0)[0]:
                return True
            asyncio.run(client.changed())  # Clears what woke it.
            return False

        wait_for("the descriptor to be quiet", quiet)

    def quiet(self, client):
        """The descriptor, once the events of the start are over."""
        client.acquire("planner").close()
        fd = client.fileno()

        def still():
            client.clear_events()
            return not select.select([fd], [], [], 0.1)[0]

        wait_for("the descriptor to be quiet", still)
        return fd

    def test_a_task_that_was_busy_when_others_were_told_is_told_when_it_waits(self):
        self.two_versions()
        client = self.connect()
        live = client.follow("planner")
        told = []

        def still():
            client.clear_events()
            return not select.select([client], [], [], 0.2)[0]

        async def first(others):
            while live.adopt().version != 2:
                await client.changed()
            others.set()

        async def busy(others):
            await client.changed()  # From now on it is one that waits.
            await others.wait()     # It works, while the event goes to the other one.
            await asyncio.get_running_loop().run_in_executor(None, wait_for, "silence", still)
            await client.changed()
            told.append(live.current.version)

        async def both():
            others = asyncio.Event()
            tasks = [asyncio.create_task(each(others)) for each in (busy, first)]
            await asyncio.get_running_loop().run_in_executor(None, self.swap, 2)
            await asyncio.wait_for(asyncio.gather(*tasks), harness.DEADLINE_S)

        asyncio.run(both())
        self.assertEqual(told, [2])

    def test_a_wait_with_a_limit_waits_again_after_an_event(self):
        self.two_versions()
        client = self.connect()
        handle = client.acquire("planner")

        async def by_wait_for():  # Each makes a task of its own.
            await asyncio.wait_for(client.changed(), 0.3)

        async def by_timeout():
            if not await client.changed(timeout=0.3):
                raise asyncio.TimeoutError

        async def look(wait):
            await asyncio.get_running_loop().run_in_executor(None, self.swap, 3 - handle_version())
            told = 0
            with self.assertRaises(asyncio.TimeoutError):
                while told < 20:  # A swap is a few events.
                    await wait()
                    told += 1
            self.assertGreater(told, 0)

        def handle_version():
            return self.connect().acquire("planner").version

        for wait in (by_wait_for, by_timeout):
            with self.subTest(wait.__name__):
                asyncio.run(look(wait))
        self.assertTrue(handle.superseded)

    def test_a_thread_that_clears_events_takes_none_from_tasks(self):
        self.two_versions()
        client = self.connect()
        live = client.follow("planner")
        fd = self.quiet(client)

        async def wait():
            task = asyncio.create_task(client.changed())
            await asyncio.sleep(0)
            # The loop looks at the descriptor only when all events have been cleared.
            swap = threading.Thread(target=self.swap, args=(2,))
            swap.start()
            swap.join()
            while select.select([fd], [], [], 0.5)[0]:
                client.clear_events()
            await asyncio.wait_for(task, harness.DEADLINE_S)

        asyncio.run(wait())
        wait_for("the new version", lambda: live.adopt().version == 2)

    def test_a_signal_handler_may_close_the_client_at_any_point_of_a_wait(self):
        self.two_versions()
        out = self.script("""
            import asyncio, signal
            client = modelhost.connect(runtime)
            signal.signal(signal.SIGTERM, lambda *_: client.close())

            class Struck:  # The signal comes when the lock has been taken.
                def __init__(self, lock):
                    self.lock, self.struck = lock, False

                def __enter__(self):
                    self.lock.acquire()
                    if not self.struck:
                        self.struck = True
                        signal.raise_signal(signal.SIGTERM)

                def __exit__(self, *_):
                    self.lock.release()

            client._waiters._lock = Struck(client._waiters._lock)

            async def wait():
                try:
                    await client.changed(timeout=60)
                except modelhost.FailedPrecondition:
                    print("closed")

            asyncio.run(wait())
        """)
        self.assertEqual(out.split(), ["closed"])

    def test_what_came_before_the_first_wait_is_told(self):
        self.two_versions()
        client = self.connect()
        live = client.follow("planner")
        self.swap(2)
        wait_for("the new version", lambda: live.adopt().version == 2)
        # Nothing more happens: whoever looks for the first time is told to look.
        asyncio.run(asyncio.wait_for(client.changed(), harness.DEADLINE_S))

    def test_closing_a_client_fails_tasks_that_wait_for_changes(self):
        self.two_versions()

        async def wait_and_close(client, close):
            tasks = [asyncio.create_task(client.changed()) for _ in range(2)]
            await asyncio.sleep(0)
            await asyncio.get_running_loop().run_in_executor(None, close)
            done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True),
                                          harness.DEADLINE_S)
            for error in done:
                self.assertIsInstance(error, self.modelhost.FailedPrecondition)
            with self.assertRaises(self.modelhost.FailedPrecondition):
                await client.changed()

        for keep in (False, True):
            with self.subTest(keep):
                client = self.connect()
                self.quiet(client)
                handle = client.acquire("planner") if keep else None
                fds = harness.footprint(os.getpid())["fds"]
                asyncio.run(wait_and_close(client, client.close))
                self.assertLessEqual(harness.footprint(os.getpid())["fds"], fds)
                del handle

    def test_a_reader_of_the_programs_own_beside_a_task_lives_on_and_does_not_spin_at_the_end(self):
        self.two_versions()
        client = self.connect()
        handle = client.acquire("planner")
        fd = self.quiet(client)
        woken = []

        async def run():
            loop = asyncio.get_running_loop()
            event = asyncio.Event()

            def on_event():
                client.clear_events()
                woken.append(1)
                event.set()

            loop.add_reader(fd, on_event)
            task = asyncio.create_task(client.changed())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await loop.run_in_executor(None, self.swap, 2)
            await asyncio.wait_for(event.wait(), harness.DEADLINE_S)
            client.close()
            for _ in range(200):
                await asyncio.sleep(0)
            woken.clear()
            for _ in range(200):
                await asyncio.sleep(0)
            loop.remove_reader(fd)

        asyncio.run(run())
        self.assertEqual(woken, [])
        self.assertTrue(handle.superseded)

    def test_an_event_wakes_the_tasks_of_every_loop(self):
        self.two_versions()
        client = self.connect()
        self.quiet(client)
        waiting = threading.Barrier(3)
        woken = []

        async def wait(name):
            task = asyncio.create_task(client.changed())
            await asyncio.sleep(0)
            waiting.wait(harness.DEADLINE_S)
            await asyncio.wait_for(task, 2 * harness.DEADLINE_S)  # Which would wake it as well.
            woken.append(name)

        threads = [threading.Thread(target=lambda name=name: asyncio.run(wait(name))) for name in "ab"]
        for thread in threads:
            thread.start()
        waiting.wait(harness.DEADLINE_S)
        self.swap(2)
        for thread in threads:
            thread.join(harness.DEADLINE_S)
        self.assertEqual(sorted(woken), ["a", "b"])

    def test_a_loop_that_was_closed_while_a_task_waited_does_not_keep_others_from_waking(self):
        self.two_versions()
        client = self.connect()
        handle = client.acquire("planner")
        self.quiet(client)
        loop = asyncio.new_event_loop()
        task = loop.create_task(client.changed())
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

        async def wait():
            waiter = asyncio.create_task(client.changed())
            await asyncio.sleep(0)
            await asyncio.get_running_loop().run_in_executor(None, self.swap, 2)
            await asyncio.wait_for(waiter, harness.DEADLINE_S)

        asyncio.run(wait())
        self.assertFalse(task.done())
        self.assertTrue(handle.superseded)
        task._log_destroy_pending = False  # It never ends; that is what this is about.

    def test_the_daemon_may_die_and_come_back(self):
        self.two_versions()
        client = self.connect(timeout=1)
        handle = client.acquire("planner")
        live = client.follow("planner")
        file = handle.file("tokenizer.json")
        self.daemon.kill()
        wait_for("the loss to be seen", lambda: not client.state().connected)
        self.assertEqual(seed_of(handle), 1)
        self.assertIn(b'"seed": 1', bytes(file))
        self.assertIn(b'"seed": 1', bytes(handle.file("tokenizer.json")))
        with self.assertRaises((self.modelhost.Unavailable, self.modelhost.DeadlineExceeded)):
            client.acquire("planner", timeout=0.3)
        with self.assertRaises((self.modelhost.Unavailable, self.modelhost.DeadlineExceeded)):
            handle.file("config.json")
        self.daemon.start()
        with harness.as_peer(harness.CLIENT):
            wait_for("the client to be back", lambda: client.state().connected)
        self.assertEqual(client.state().reconnects, 1)
        self.swap(2)
        wait_for("the newer version", lambda: live.adopt().version == 2)
        self.assertEqual((seed_of(handle), seed_of(live.current)), (1, 2))
        self.assertIn(b'"seed": 1', bytes(handle.file("config.json")))

    def test_an_evicted_version_can_be_read_on(self):
        self.two_versions()
        client = self.connect()
        handle = client.acquire("planner")
        view = memoryview(handle["layer.0.weight"])
        (lease,) = self.json("leases")["items"]
        self.ctl("evict", lease["id"], "--yes")
        self.swap(2)
        self.wait_leases(0)
        self.assertEqual(models.seeds_in(view), {1})
        self.assertEqual(seed_of(handle), 1)
        self.assertEqual(client.acquire("planner").version, 2)
        handle.close()
        del view
        self.assertTrue(client.state().connected)

    def test_the_gil_is_free_while_a_call_waits(self):
        self.two_versions()
        client = self.connect()

        def serve(version):
            self.publish("planner", version)
            self.ctl("load", f"planner@{version}")

        late = self.folder / "late"
        for what, call, make_it_end in [
                ("acquire", lambda: client.acquire("planner@3", wait=True, timeout=harness.DEADLINE_S),
                 lambda: serve(3)),
                ("acquire_set", lambda: client.acquire_set(["planner@4"], wait=True,
                                                           timeout=harness.DEADLINE_S),
                 lambda: serve(4)),
                ("follow", lambda: client.follow("planner@5", wait=True, timeout=harness.DEADLINE_S),
                 lambda: serve(5)),
                ("follow_set", lambda: client.follow_set(["planner@6"], wait=True,
                                                         timeout=harness.DEADLINE_S),
                 lambda: serve(6)),
                ("connect", lambda: self.modelhost.connect(late / "run", timeout=harness.DEADLINE_S),
                 lambda: self.new_daemon("late"))]:
            with self.subTest(what):
                answers = []
                waiter = threading.Thread(target=lambda: answers.append(call()))
                waiter.start()
                make_it_end()  # By this thread: not before the timeout if the other had the GIL.
                waiter.join()
                self.assertEqual(len(answers), 1)

    def test_the_gil_is_free_while_a_file_is_fetched(self):
        self.serve("planner", 1)
        handle = self.connect(timeout=harness.DEADLINE_S).acquire("planner")
        self.daemon.kill()
        files = []
        waiter = threading.Thread(target=lambda: files.append(handle.file("config.json")))
        waiter.start()
        self.daemon.start()  # By this thread: not before the timeout if the other had the GIL.
        with harness.as_peer(harness.CLIENT):
            waiter.join()
        self.assertEqual(bytes(files[0])[:1], b"{")
