"""The compiled part of the wheel, by CMake; all else is in pyproject.toml."""
import os
import pathlib
import shutil
import subprocess
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist
from setuptools.errors import SetupError

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LIBRARY = "libmodelhost.so.1"


class BuildNative(build_ext):
    """Copies the extension and the library from a build folder, which it makes unless
    MODELHOST_BUILD names one."""

    def run(self):
        given = os.environ.get("MODELHOST_BUILD")
        if not given and not (ROOT / "client" / "src").is_dir():
            raise SetupError(f"modelhost: the C++ sources of the library are not at {ROOT} (build in "
                             "client/python of a clone of modelhost, or name its build folder with "
                             "MODELHOST_BUILD)")
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


class NoSourceDistribution(sdist):
    """An archive of this folder could not be built: most of what it is made of lies outside."""

    def run(self):
        raise SetupError("modelhost: there is no source distribution of the Python package alone, its "
                         "C++ library is not part of this folder (make a wheel: python3 -m pip wheel "
                         "--no-build-isolation client/python; or archive the whole clone)")


setup(ext_modules=[Extension("modelhost._native", sources=[])],
      cmdclass={"build_ext": BuildNative, "sdist": NoSourceDistribution})
