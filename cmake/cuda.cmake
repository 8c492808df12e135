# SPDX-License-Identifier: MIT
#
# The CUDA part: the host side in C, and the text of the kernels, which NVRTC compiles at run time. Needs no part of CUDA:
# driver and NVRTC are found at run time. Appends to NORMFUSE_SOURCES and NORMFUSE_DEFINITIONS.

set(NORMFUSE_CUDA_DEFAULT OFF)
if(NORMFUSE_X86_64 OR NORMFUSE_AARCH64)
    set(NORMFUSE_CUDA_DEFAULT ON)
endif()
if(DEFINED ENV{NORMFUSE_CUDA})
    set(NORMFUSE_CUDA_DEFAULT $ENV{NORMFUSE_CUDA})
endif()
option(NORMFUSE_CUDA "Build the CUDA part: calls on GPUs" ${NORMFUSE_CUDA_DEFAULT})
if(NOT NORMFUSE_CUDA)
    message(STATUS "CUDA: left out; building the CPU library only")
    return()
endif()
message(STATUS "CUDA: in the library; the driver and NVRTC are found at run time")

file(GLOB device_files CONFIGURE_DEPENDS src/cuda/device/*.cuh src/cuda/device/*.h)
foreach(file ${device_files})
    get_filename_component(name ${file} NAME_WE)
    get_filename_component(included ${file} NAME)
    string(APPEND NORMFUSE_TEXTS
        "name_${name}:\n    .asciz \"${included}\"\ntext_${name}:\n    .incbin \"${file}\"\n    .byte 0\n")
    string(APPEND NORMFUSE_TEXT_POINTERS "    .quad name_${name}, text_${name}\n")
endforeach()
enable_language(ASM)
set(texts ${PROJECT_BINARY_DIR}/generated/normfuse_texts.S)
configure_file(cmake/texts.S.in ${texts} @ONLY)
set_source_files_properties(${texts} PROPERTIES OBJECT_DEPENDS "${device_files}")
if(CMAKE_C_COMPILER_ID MATCHES "Clang")
    # It warns of every flag that means nothing to an assembler.
    set_source_files_properties(${texts} PROPERTIES COMPILE_OPTIONS "-Wno-unused-command-line-argument")
endif()

list(APPEND NORMFUSE_SOURCES
    src/cuda/cache.c
    src/cuda/compile.c
    src/cuda/hash.c
    src/cuda/held.c
    src/cuda/launch.c
    src/cuda/loader.c
    src/cuda/plan.c
    src/cuda/schedules.c
    src/cuda/shape.c
    src/cuda/signature.c
    src/cuda/single.c
    src/cuda/specialize.c
    src/cuda/stream.c
    src/cuda/tiling.c
    src/cuda/transpose.c
    ${texts})
list(APPEND NORMFUSE_DEFINITIONS NORMFUSE_HAVE_CUDA)
