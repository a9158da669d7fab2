"""Models in the life of a managed node: each transition, and what an operator, a crash and a typing
error do to it. Every case runs on the example and on the rclcpp node, which is compiled against a fake."""
import re
import subprocess
import unittest

import harness
import models
from harness import Case, smoke, wait_for

ANSWER = re.compile(r"(\w+) (\w+) (\w+): (.*)\n")
TENSORS, TENSOR_BYTES = 4, 64 << 10


def sum_of_bytes(*seeds):
    return sum(TENSORS * sum(models.fill(seed, TENSOR_BYTES)) for seed in seeds)


class Node:
    """A node's process: one line in, one line back."""

    def __init__(self, program, runtime, *arguments):
        self.process = subprocess.Popen(
            [str(program), "--runtime-dir", str(runtime), *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/",
            env=harness.environment(), preexec_fn=harness.end_with_us, **harness.as_user(harness.CLIENT))

    def begin(self, verb):
        self.process.stdin.write(verb + "\n")
        self.process.stdin.flush()

    def answer(self):
        """(verb, outcome, state, detail)"""
        line = self.process.stdout.readline()
        match = ANSWER.fullmatch(line)
        if not match:
            raise AssertionError(f"the node said {line!r} and ended: {self.process.communicate()}")
        return match.groups()

    def say(self, verb):
        self.begin(verb)
        return self.answer()[1:]

    def close(self):
        """Its log."""
        _, log = self.process.communicate(timeout=harness.DEADLINE_S)
        return log


class Lifecycle:
    """The cases; a class below says of what program."""

    def node(self, *arguments, runtime=None):
        node = Node(self.program(), runtime or self.daemon.runtime, *arguments)
        self.addCleanup(node.process.kill)
        self.addCleanup(self.finish, node)
        return node

    def finish(self, node):
        log = node.close()
        # 2, 3: what it refused to run with; -9: by a case. All else is a crash, or a sanitizer's.
        self.assertIn(node.process.returncode, (0, 2, 3, -9), log)

    def active(self, *arguments):
        node = self.node(*arguments)
        self.assertEqual(node.say("configure")[:2], ("SUCCESS", "inactive"))
        self.assertEqual(node.say("activate")[:2], ("SUCCESS", "active"))
        return node

    def kept(self, node, name, *seeds, state="active"):
        self.assertEqual(node.say("tick"), ("KEPT", state, f"{name} sum {sum_of_bytes(*seeds)}"))

    def wait_adopted(self, node):
        """The answer of the tick that adopted; those before it kept what they had."""
        return wait_for("the node to adopt", lambda: next(
            (answer for answer in [node.say("tick")] if answer[0] == "ADOPTED"), None))

    def leases(self):
        return [(row["model"], row["version"]) for row in self.json("leases")["items"]]

    @smoke
    def test_a_whole_life(self):
        self.serve("planner", 1)
        node = self.node()
        self.assertEqual(node.say("tick"), ("KEPT", "unconfigured", " sum 0"))
        self.assertEqual(self.leases(), [])
        self.assertEqual(node.say("configure"), ("SUCCESS", "inactive", "planner@1"))
        self.assertEqual(self.leases(), [("planner", 1)])
        self.assertEqual(node.say("activate"), ("SUCCESS", "active", "planner@1"))
        self.kept(node, "planner@1", 1)
        self.assertEqual(node.say("deactivate"), ("SUCCESS", "inactive", "planner@1"))
        self.assertEqual(self.leases(), [("planner", 1)])
        self.assertEqual(node.say("cleanup"), ("SUCCESS", "unconfigured", ""))
        self.wait_leases(0)
        self.assertEqual(node.say("configure"), ("SUCCESS", "inactive", "planner@1"))
        self.assertEqual(node.say("shutdown"), ("SUCCESS", "finalized", ""))
        self.wait_leases(0)
        self.assertNotEqual(node.say("configure")[0], "SUCCESS")

    def test_configure_waits_until_the_model_is_ready(self):
        self.publish("planner", 1)
        node = self.node("--deadline-ms", int(harness.DEADLINE_S * 1000))
        node.begin("configure")
        wait_for("the node to come", lambda: self.json("clients")["items"])
        self.ctl("swap", "planner", "--version", "1")
        self.assertEqual(node.answer()[1:], ("SUCCESS", "inactive", "planner@1"))

    def test_configure_fails_when_the_model_is_not_ready_in_time_and_may_be_tried_again(self):
        self.publish("planner", 1)
        node = self.node("--deadline-ms", 200, "--model", "planner@1")
        outcome, state, why = node.say("configure")
        self.assertEqual((outcome, state), ("FAILURE", "unconfigured"))
        self.assertRegex(why, r"^DEADLINE_EXCEEDED: .*planner@1")
        self.wait_leases(0)
        self.ctl("load", "planner@1")
        self.assertEqual(node.say("configure"), ("SUCCESS", "inactive", "planner@1"))

    def test_configure_fails_when_there_is_no_daemon_and_may_be_tried_again(self):
        self.serve("planner", 1)
        self.daemon.stop()
        node = self.node("--deadline-ms", 200)
        outcome, state, why = node.say("configure")
        self.assertEqual((outcome, state), ("FAILURE", "unconfigured"))
        self.assertIn("UNAVAILABLE", why)
        self.assertIn(str(self.daemon.runtime), why)
        self.daemon.start()
        wait_for("configure to succeed", lambda: node.say("configure")[0] == "SUCCESS")

    def test_a_wrong_name_is_waited_for_and_the_text_has_the_right_one(self):
        self.serve("planner", 1)
        node = self.node("--model", "planer", "--deadline-ms", 200)
        outcome, state, why = node.say("configure")
        self.assertEqual((outcome, state), ("FAILURE", "unconfigured"))
        self.assertRegex(why, r"^DEADLINE_EXCEEDED: .*planer: .*did you mean planner\?")

    def test_a_reference_that_is_none_is_an_error_that_ends_unconfigured(self):
        self.serve("planner", 1)
        node = self.node("--model", "Planner!")
        outcome, state, why = node.say("configure")
        self.assertEqual((outcome, state), ("ERROR", "unconfigured"))
        self.assertRegex(why, r"INVALID_ARGUMENT: .*Planner!")
        self.assertEqual(node.say("configure")[0], "ERROR")
        self.wait_leases(0)

    def test_what_a_state_does_not_have_changes_nothing(self):
        self.serve("planner", 1)
        node = self.node()
        for verb in ("activate", "deactivate", "cleanup"):
            outcome, state, _ = node.say(verb)
            self.assertIn(outcome, self.REFUSED)
            self.assertEqual(state, "unconfigured")
        self.assertEqual(node.say("configure")[0], "SUCCESS")
        for verb in ("configure", "deactivate"):
            self.assertIn(node.say(verb)[0], self.REFUSED)
        self.assertEqual(node.say("activate")[0], "SUCCESS")
        for verb in ("configure", "activate", "cleanup"):
            outcome, state, _ = node.say(verb)
            self.assertIn(outcome, self.REFUSED)
            self.assertEqual(state, "active")
        self.kept(node, "planner@1", 1)
        self.assertEqual(self.leases(), [("planner", 1)])

    @smoke
    def test_a_swap_is_adopted_at_a_tick_and_once(self):
        self.serve("planner", 1)
        self.publish("planner", 2)
        node = self.active()
        self.ctl("swap", "planner", "--version", "2")
        self.assertEqual(self.wait_adopted(node),
                         ("ADOPTED", "active", f"planner@2 sum {sum_of_bytes(2)}"))
        for _ in range(20):
            self.kept(node, "planner@2", 2)
        wait_for("the lease on the old one to end", lambda: self.leases() == [("planner", 2)])

    def test_an_inactive_node_keeps_its_version_and_activate_adopts(self):
        self.serve("planner", 1)
        self.publish("planner", 2)
        node = self.active()
        self.assertEqual(node.say("deactivate")[0], "SUCCESS")
        self.ctl("swap", "planner", "--version", "2")
        wait_for("the library to have attached the new one",
                 lambda: ("planner", 2) in self.leases())
        for _ in range(5):
            self.kept(node, "planner@1", 1, state="inactive")

        def activate():
            outcome, _, names = node.say("activate")
            self.assertEqual(outcome, "SUCCESS")
            # Attached it is; that it can be adopted may take a moment more.
            return names == "planner@2" or (node.say("deactivate") and False)
        wait_for("activate to adopt", activate)
        self.kept(node, "planner@2", 2)

    def test_models_that_belong_together_are_adopted_together(self):
        for name in ("planner", "detector"):
            self.serve(name, 1)
            self.publish(name, 2)
        node = self.active("--model", "planner", "--model", "detector")
        self.kept(node, "planner@1 detector@1", 1, 1)
        self.ctl("swap", "planner", "--version", "2", "--set", "detector=2")
        self.assertEqual(self.wait_adopted(node)[2],
                         f"planner@2 detector@2 sum {sum_of_bytes(2, 2)}")

    def test_a_killed_daemon_stops_no_tick_and_a_new_one_is_followed(self):
        self.serve("planner", 1)
        self.publish("planner", 2)
        node = self.active()
        self.daemon.kill()
        for _ in range(10):
            self.kept(node, "planner@1", 1)
        self.assertEqual(node.say("deactivate")[0], "SUCCESS")
        self.assertEqual(node.say("activate")[0], "SUCCESS")
        self.kept(node, "planner@1", 1)
        self.daemon.start()
        wait_for("the node's lease in the new daemon's books",
                 lambda: self.leases() == [("planner", 1)])
        self.ctl("swap", "planner", "--version", "2")
        self.assertEqual(self.wait_adopted(node)[2].split()[0], "planner@2")
        self.kept(node, "planner@2", 2)

    def test_a_node_that_dies_leaves_nothing(self):
        self.serve("planner", 1)
        node = self.active()
        node.process.kill()
        self.wait_leases(0)


class Example(Lifecycle, Case):
    REFUSED = ("FAILURE",)

    def program(self):
        return harness.PROGRAMS.bin / "modelhost-lifecycle"

    def test_a_refusal_says_what_to_do_first(self):
        self.assertEqual(self.node().say("activate")[2],
                         "cannot activate: the node is unconfigured (configure it first)")

    def test_an_unknown_line_ends_it(self):
        node = self.node()
        node.begin("confgure")
        self.assertIn("error: 'confgure'", node.close())
        self.assertEqual(node.process.returncode, 2)


class RclcppNode(Lifecycle, Case):
    # The state machine refuses before any callback of ours is called.
    REFUSED = ("REFUSED",)

    def program(self):
        return harness.PROGRAMS.ros_node

    def test_what_happens_is_in_the_log(self):
        self.serve("planner", 1)
        self.publish("planner", 2)
        node = self.active()
        self.ctl("swap", "planner", "--version", "2")
        self.wait_adopted(node)
        log = node.close()
        for line in ("[INFO] [model_node]: configure: planner@1",
                     "[INFO] [model_node]: adopted planner@2"):
            self.assertIn(line, log)

    def test_a_deadline_that_is_none_fails_before_anything_is_asked(self):
        node = self.node("--deadline-ms", -5)
        self.assertEqual(node.say("configure")[:2], ("FAILURE", "unconfigured"))
        self.assertIn("deadline_s is -0.005", node.close())

    def test_a_parameter_of_another_type_is_refused_when_the_node_is_made(self):
        node = self.node("--mistyped")
        self.assertIn("parameter 'period_ms' has another type", node.close())
        self.assertEqual(node.process.returncode, 3)


if __name__ == "__main__":
    unittest.main()
