"""Builds the native code of `radixkv_cpu`, once for every generation of processors; all else is in pyproject.toml."""

import platform
import runpy
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = sorted(str(path) for path in Path("kernels/radixkv_cpu/src").glob("*.cpp"))
COMMON = ["-std=c++17", "-O3", "-g0", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"]
# Python's own flags let signed integers wrap around, with which attention in float32 takes 1.2 to 1.3 times as long.
COMMON += ["-fno-wrapv"]
# GCC warns that its ABI for vectors has changed, which does not matter here, and of undefined values in its own intrinsics.
COMMON += ["-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
# The digest by which a library is identified when it is loaded. Run by its path: importing its package would import torch.
source_digest = runpy.run_path("kernels/radixkv_cpu/source_digest.py")["source_digest"]
COMMON += [f'-DRADIXKV_SOURCES="{source_digest(Path("kernels/radixkv_cpu/src"))}"']
# `radixkv_cpu.library` chooses among these when it is imported.
VARIANTS = {
    "amx": ["-march=sapphirerapids"],
    "avx512_bf16": ["-march=x86-64-v4", "-mavx512bf16"],
    "avx512": ["-march=x86-64-v4"],
    "avx2": ["-march=x86-64-v3", "-O2"],  # -O3 takes five times as long to compile
}


class BuildVariants(build_ext):
    """Shared libraries without a Python interface: `ctypes` loads them, so a build serves every Python and torch."""

    def build_extensions(self) -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(self.build_extension, self.extensions))

    def build_extension(self, ext: Extension) -> None:
        with tempfile.TemporaryDirectory() as folder:
            try:
                objects = self.compiler.compile(ext.sources, folder, extra_postargs=ext.extra_compile_args)
                # Without -fopenmp: OpenMP's functions come from the runtime that torch has loaded.
                self.compiler.link_shared_object(objects, self.get_ext_fullpath(ext.name), target_lang="c++")
            except Exception as error:  # no compiler, or one that does not know the processor
                self.announce(f"radixkv_cpu: {ext.name} was not built, torch stands in for it: {error}", level=3)

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if Path(path).exists()]


class AnyPythonWheel(bdist_wheel):
    """A wheel for one platform and every Python: see `BuildVariants`."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(f"radixkv_cpu.libradixkv_cpu_{name}", SOURCES, extra_compile_args=[*COMMON, *flags], optional=True)
        for name, flags in VARIANTS.items()
        if platform.machine() == "x86_64"
    ],
    cmdclass={"bdist_wheel": AnyPythonWheel, "build_ext": BuildVariants},
)
