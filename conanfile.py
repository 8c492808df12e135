# SPDX-License-Identifier: MIT
"""The recipe of Conan 2: `conan create .` builds the library and runs tests/consumers/conan against it."""
import os
import re

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load, rmdir


class Normfuse(ConanFile):
    name = "normfuse"
    description = "Normalization layers of neural networks that read the tensor once"
    license = "MIT"
    topics = ("neural-networks", "group-norm", "batch-norm", "cuda")
    package_type = "library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"shared": [True, False], "cuda": [True, False]}
    default_options = {"shared": False, "cuda": True}
    exports_sources = ("CMakeLists.txt", "LICENSE", "cmake/*", "include/*", "src/*")
    test_package_folder = "tests/consumers/conan"

    def set_version(self):
        header = load(self, os.path.join(self.recipe_folder, "include/normfuse.h"))
        self.version = ".".join(re.findall(r"#define NORMFUSE_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header))

    def configure(self):
        self.settings.rm_safe("compiler.cppstd")
        self.settings.rm_safe("compiler.libcxx")

    def validate(self):
        if self.settings.os != "Linux":
            raise ConanInvalidConfiguration("normfuse supports 64-bit Linux")

    def layout(self):
        cmake_layout(self)

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables.update({
            "NORMFUSE_BUILD_SHARED": bool(self.options.shared), "NORMFUSE_BUILD_CLI": False,
            "NORMFUSE_BUILD_TESTS": False, "NORMFUSE_CUDA": "ON" if self.options.cuda else "OFF"})
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))
        CMake(self).install()
        # Conan writes these itself.
        rmdir(self, os.path.join(self.package_folder, "lib", "cmake"))
        rmdir(self, os.path.join(self.package_folder, "lib", "pkgconfig"))
        if self.options.shared:
            os.remove(os.path.join(self.package_folder, "lib", "libnormfuse.a"))

    def package_info(self):
        self.cpp_info.set_property("cmake_file_name", "normfuse")
        self.cpp_info.set_property("cmake_target_name", "normfuse::normfuse")
        self.cpp_info.set_property("pkg_config_name", "normfuse")
        self.cpp_info.libs = ["normfuse"]
        if not self.options.shared:
            self.cpp_info.system_libs = ["m", "pthread", "dl"]
            # Threads of the pool never end, so what holds them may not be unloaded.
            self.cpp_info.sharedlinkflags = ["-Wl,-z,nodelete"]
