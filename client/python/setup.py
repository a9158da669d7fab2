"""The compiled part of the wheel, by CMake; all else is in pyproject.toml."""
import os
import pathlib
import shutil
import subprocess
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LIBRARY = "libmodelhost.so.1"


class BuildNative(build_ext):
    """Copies the extension and the library from a build folder, which it makes unless
    MODELHOST_BUILD names one."""

    def run(self):
        given = os.environ.get("MODELHOST_BUILD")
        folder = pathlib.Path(given) if given else pathlib.Path(self.build_temp).resolve() / "cmake"
        if not given:
            subprocess.run(
                ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja",
                 "-DCMAKE_BUILD_TYPE=Release", "-DMODELHOST_GRPC=OFF", "-DMODELHOST_TESTS=OFF",
                 "-DMODELHOST_UNITY=ON", "-DMODELHOST_PYTHON=ON",
                 f"-DMODELHOST_PYTHON_EXECUTABLE={sys.executable}"], check=True)
            subprocess.run(["cmake", "--build", str(folder), "--target", "modelhost_python"], check=True)
        target = HERE if self.inplace else pathlib.Path(self.build_lib)
        target = target / "modelhost"
        target.mkdir(parents=True, exist_ok=True)
        name = self.get_ext_filename("_native")
        shutil.copy2(folder / "python" / "modelhost" / name, target / name)
        shutil.copy2((folder / "lib" / LIBRARY).resolve(), target / LIBRARY)


setup(ext_modules=[Extension("modelhost._native", sources=[])], cmdclass={"build_ext": BuildNative})
