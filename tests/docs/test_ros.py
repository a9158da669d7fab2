"""docs/ros.md: its workspace is built by colcon, with its package, and run; what makes our folders packages.

There is no ROS here. colcon, catkin_pkg and ament_cmake are Debian's; rclcpp is the fake of tests/fakes/ros.
"""
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

import newcomer  # noqa: F401  (the folders of harness and case)
import harness
from blocks import Page
from harness import ROOT, Case, environment

PACKAGES = ["modelhost", "modelhost_lifecycle"]
FAKE = ROOT / "tests/fakes/ros"
MANIFESTS = {name: ROOT / "client/ros" / name / "package.xml" for name in PACKAGES}


def colcon(*arguments, cwd, env=None):
    done = subprocess.run(["colcon", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, errors="replace", check=False, cwd=cwd, timeout=20 * harness.DEADLINE_S,
                          env=environment(HOME=str(cwd), COLCON_HOME=str(cwd), **(env or {})))
    if done.returncode != 0:
        raise AssertionError(f"colcon {arguments}: {done.returncode}\n{done.stdout[-8000:]}")
    return done.stdout


class Packages(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="modelhost-ros-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def test_the_manifests_are_good_to_catkin_pkg(self):
        try:
            from catkin_pkg.package import parse_package, parse_package_string
        except ImportError:
            self.skipTest("there is no catkin_pkg (python3-catkin-pkg)")
        warnings = []
        for name, path in MANIFESTS.items():
            package = parse_package(str(path), warnings=warnings)
            self.assertEqual((package.name, package.package_format), (name, 3))
            self.assertIn(package.get_build_type(), ("cmake", "ament_cmake"))
        example = Page("docs/ros.md").one("xml", "<package").text
        package = parse_package_string(example, "docs/ros.md", warnings=warnings)
        self.assertEqual([depend.name for depend in package.build_depends], ["modelhost"])
        self.assertEqual(warnings, [])

    def test_colcon_finds_them_through_a_link_and_by_base_paths(self):
        found = colcon("list", "--base-paths", ROOT / "client/ros", cwd=self.folder)
        rows = [line.split("\t") for line in found.splitlines()]
        self.assertEqual([(name, kind) for name, _, kind in rows],
                         [("modelhost", "(ros.cmake)"), ("modelhost_lifecycle", "(ros.ament_cmake)")])
        (self.folder / "src").mkdir()
        (self.folder / "src/modelhost").symlink_to(ROOT / "client/ros")
        found = colcon("list", "--names-only", cwd=self.folder)
        self.assertEqual(found.split(), PACKAGES)

    def test_colcon_takes_the_root_of_the_tree_for_the_whole_project(self):
        # Why the page says to link client/ros: were this otherwise, the tree itself could be linked.
        self.assertFalse((ROOT / "package.xml").exists())
        found = colcon("list", "--base-paths", ROOT, cwd=self.folder)
        self.assertRegex(found, r"^modelhost\t\S+\t\(cmake\)\n$")

    def test_without_ros_the_node_is_not_built_and_that_is_said(self):
        source = ROOT / "client/ros/modelhost_lifecycle"
        done = subprocess.run(["cmake", "-S", source, "-B", self.folder / "build", "-G", "Ninja",
                               "-DCMAKE_DISABLE_FIND_PACKAGE_rclcpp_lifecycle=ON"],
                              capture_output=True, text=True, check=False, env=environment())
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("The ROS node is not built: rclcpp_lifecycle", done.stdout)


class Workspace(Case):
    def test_the_page_is_followed_in_a_workspace(self):
        page = Page("docs/ros.md")
        home = self.folder / "home"
        node = home / "ws/src/my_node"
        node.mkdir(parents=True)
        (home / "modelhost").symlink_to(ROOT)
        for name, language, text in (("package.xml", "xml", "<package"), ("CMakeLists.txt", "cmake", "ament_package"),
                                     ("my_node.cc", "cpp", "int main(")):
            (node / name).write_text(page.one(language, text).text)
        self.serve("planner", 1)
        build, alone = page.one("sh", "colcon build"), page.one("sh", "printf")
        self.assertEqual(page.left, [])
        # Quicker than a robot would; and the fake, where ROS would have been sourced.
        extra = "--cmake-args -GNinja " + " ".join([
            "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0", "-DMODELHOST_UNITY=ON",
            f"-Drclcpp_lifecycle_DIR={FAKE}/cmake", f"-Drclcpp_components_DIR={FAKE}/cmake"])
        if shutil.which("ccache"):
            extra += " -DCMAKE_CXX_COMPILER_LAUNCHER=ccache"
        text = re.sub(r"(?m)^colcon build$", f"colcon build {extra}", build.text)
        self.assertNotEqual(text, build.text)
        env = environment(HOME=str(home), MODELHOST_RUNTIME_DIR=str(self.daemon.runtime),
                          CCACHE_BASEDIR=str(ROOT), CCACHE_NOHASHDIR="1")
        del env["LD_LIBRARY_PATH"]
        # colcon's own setup.sh looks at variables that are not set.
        done = subprocess.run(["sh", "-ec", text], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              errors="replace", check=False, cwd=home, env=env, timeout=20 * harness.DEADLINE_S)
        self.assertEqual(done.returncode, 0, done.stdout[-8000:])
        self.assertIn("planner@1, 4 tensors\n", done.stdout)
        self.check_installed(home / "ws/install")
        if (ROOT / "build/release").resolve() == harness.PROGRAMS.build:
            done = subprocess.run(["sh", "-euc", alone.text], capture_output=True, text=True, check=False, cwd=home,
                                  env=env, timeout=harness.DEADLINE_S)
            self.assertEqual([line.split(" sum")[0] for line in done.stdout.splitlines()], [
                "configure SUCCESS inactive: planner@1", "activate SUCCESS active: planner@1",
                "tick KEPT active: planner@1", "deactivate SUCCESS inactive: planner@1",
                "cleanup SUCCESS unconfigured: "], done.stderr)

    def check_installed(self, install):
        library = install / "modelhost"
        needed = subprocess.run(["readelf", "-d", str(library / "lib/libmodelhost.so")], capture_output=True, text=True,
                                check=True).stdout
        for name in re.findall(r"NEEDED.*\[(.+)\]", needed):
            self.assertRegex(name, r"^(libc|libm|libstdc\+\+|libgcc_s|ld-linux\S*)\.")
        for path in ("share/modelhost/package.xml", "share/ament_index/resource_index/packages/modelhost",
                     "include/modelhost/modelhost.hpp", "lib/cmake/modelhost/modelhostConfig.cmake",
                     "lib/pkgconfig/modelhost.pc"):
            self.assertTrue((library / path).is_file(), path)
        self.assertEqual([path.name for path in library.iterdir() if path.name in ("bin", "sbin", "etc")], [],
                         "the workspace has the client alone")
        component = install / "modelhost_lifecycle"
        self.assertTrue((component / "lib/libmodelhost_lifecycle.so").is_file())
        self.assertEqual((component / "share/ament_index/resource_index/rclcpp_components/modelhost_lifecycle").read_text(),
                         "modelhost_lifecycle::ModelNode;lib/libmodelhost_lifecycle.so\n")


def setUpModule():
    for tool, package in (("colcon", "python3-colcon-ros"), ("cmake", "cmake"), ("ninja", "ninja-build")):
        if not shutil.which(tool):
            raise unittest.SkipTest(f"there is no {tool} ({package})")
    if harness.PROGRAMS.sanitized:
        raise unittest.SkipTest("a workspace is built without sanitizers")


if __name__ == "__main__":
    unittest.main()
