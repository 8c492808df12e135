# SPDX-License-Identifier: MIT
#
# The CUDA part: nvcc makes one fatbin of each src/cuda/*.cu, an assembler file embeds them, and the host side in C
# finds the driver at run time, so the library links to nothing of CUDA. Sets NORMFUSE_HAVE_CUDA and, with it, appends
# to NORMFUSE_SOURCES and NORMFUSE_DEFINITIONS and sets NORMFUSE_CUDA_INCLUDE_DIR.

set(NORMFUSE_HAVE_CUDA OFF)

# Why there is no CUDA part: AUTO goes on without it and says so, ON stops.
macro(normfuse_no_cuda reason)
    if(NORMFUSE_CUDA STREQUAL "AUTO")
        message(STATUS "CUDA: ${reason}; building the CPU library only (NORMFUSE_CUDA=ON insists)")
        return()
    endif()
    message(FATAL_ERROR "NORMFUSE_CUDA=ON: ${reason}.")
endmacro()

set(NORMFUSE_CUDA AUTO CACHE STRING "Build the CUDA part: ON, OFF, or AUTO (where nvcc is found)")
set_property(CACHE NORMFUSE_CUDA PROPERTY STRINGS AUTO ON OFF)
set(NORMFUSE_CUDA_ARCHITECTURES "90a" CACHE STRING
    "GPUs to compile for, separated by ';': machine code (80, 90a), PTX (90-virtual, or 90-general: of the general kernels); or all")
set(NORMFUSE_CUDA_HOST_COMPILER "" CACHE STRING "The C++ compiler that nvcc preprocesses with; empty: nvcc's choice")
set(NORMFUSE_CUDA_FATBIN_DIR ${PROJECT_BINARY_DIR}/cuda CACHE PATH
    "Where the fatbins are made; build trees with the same architectures may share it")
if(NOT NORMFUSE_CUDA)
    message(STATUS "CUDA: NORMFUSE_CUDA=${NORMFUSE_CUDA}; building the CPU library only")
    return()
endif()
if(CMAKE_CROSSCOMPILING AND NORMFUSE_CUDA STREQUAL "AUTO")
    normfuse_no_cuda("a cross build")
endif()

find_program(NORMFUSE_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin
             DOC "nvcc of CUDA 12.8 or newer")
if(NOT NORMFUSE_NVCC)
    normfuse_no_cuda("nvcc was not found")
endif()

# ---- what nvcc can --------------------------------------------------------------------------------------------------

# src/cuda/ is compiled with these and nothing else: no line information, nothing of the C compiler's flags.
set(NORMFUSE_NVCC_FLAGS -fatbin -O3 -std=c++17 --compress-mode=size -Xptxas -v -I${PROJECT_SOURCE_DIR}/include)
if(NORMFUSE_CUDA_HOST_COMPILER)
    list(APPEND NORMFUSE_NVCC_FLAGS -ccbin ${NORMFUSE_CUDA_HOST_COMPILER})
endif()

set(NORMFUSE_CUDA_TARGETS ${NORMFUSE_CUDA_ARCHITECTURES})
# GPUs of 8.6 and 8.9 run machine code of 8.0, those of 10.3 that of 10.0, those of 12.1 that of 12.0. Newer ones run PTX
# of the general kernels, which take every call: that of all would be 2.4 MiB more, and take the driver three times as long.
if(NORMFUSE_CUDA_TARGETS STREQUAL "all")
    set(NORMFUSE_CUDA_TARGETS 80 90a 100 120 90-general)
endif()
set(NORMFUSE_CUDA_BUILT_FOR "")
set(NORMFUSE_CODE_OF_ALL "")
set(NORMFUSE_CODE_OF_GENERAL "")
foreach(target ${NORMFUSE_CUDA_TARGETS})
    if(target MATCHES "^([0-9]+[af]?)-(virtual|general)$")
        # Kernels of clusters and of bulk copies are empty in it, and GPUs of 9.0 and newer launch them: an H200 with PTX of
        # 8.0 ended in "unspecified launch failure". For GPUs of 8.x machine code of 8.0 serves all.
        set(virtual ${CMAKE_MATCH_1})
        set(kernels ${CMAKE_MATCH_2})
        if(virtual MATCHES "^[1-8][0-9]$")
            message(FATAL_ERROR "NORMFUSE_CUDA_ARCHITECTURES: '${target}' is PTX that newer GPUs cannot use; "
                                "write 80 for GPUs of 8.x, and 90-virtual for newer ones.")
        endif()
        if(kernels STREQUAL "virtual")
            list(APPEND NORMFUSE_CODE_OF_ALL -gencode arch=compute_${virtual},code=compute_${virtual})
            string(APPEND NORMFUSE_CUDA_BUILT_FOR " ${virtual}-PTX")
        else()
            list(APPEND NORMFUSE_CODE_OF_GENERAL -gencode arch=compute_${virtual},code=compute_${virtual})
            string(APPEND NORMFUSE_CUDA_BUILT_FOR " ${virtual}-general-PTX")
        endif()
    elseif(target MATCHES "^[0-9]+[af]?$")
        list(APPEND NORMFUSE_CODE_OF_ALL -gencode arch=compute_${target},code=sm_${target})
        string(APPEND NORMFUSE_CUDA_BUILT_FOR " ${target}")
    else()
        message(FATAL_ERROR "NORMFUSE_CUDA_ARCHITECTURES: '${target}' is neither like 90a nor like 90-virtual.")
    endif()
endforeach()
string(STRIP "${NORMFUSE_CUDA_BUILT_FOR}" NORMFUSE_CUDA_BUILT_FOR)
if(NOT NORMFUSE_CODE_OF_ALL)
    message(FATAL_ERROR "NORMFUSE_CUDA_ARCHITECTURES: '${NORMFUSE_CUDA_ARCHITECTURES}' has PTX of the general kernels alone; "
                        "name machine code beside it, such as 90a.")
endif()
# Those of bench/ and tests/ too.
set(NORMFUSE_GENERAL_FLAGS ${NORMFUSE_NVCC_FLAGS} ${NORMFUSE_CODE_OF_ALL} ${NORMFUSE_CODE_OF_GENERAL})
list(APPEND NORMFUSE_NVCC_FLAGS ${NORMFUSE_CODE_OF_ALL})

# Tried with the very flags: an old nvcc, one without a host compiler, or one that lacks an architecture is told here.
set(NORMFUSE_PROBE ${PROJECT_BINARY_DIR}/CMakeFiles/normfuse_nvcc)
if(NOT NORMFUSE_NVCC_WORKS STREQUAL "${NORMFUSE_NVCC} ${NORMFUSE_GENERAL_FLAGS}")
    file(WRITE ${NORMFUSE_PROBE}.cu "extern \"C\" __global__ void probe() {}\n")
    execute_process(COMMAND ${NORMFUSE_NVCC} ${NORMFUSE_GENERAL_FLAGS} ${NORMFUSE_PROBE}.cu -o ${NORMFUSE_PROBE}.fatbin
                    RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
    if(NOT result EQUAL 0)
        # AUTO does not let this pass quietly: who has nvcc may well want the CUDA part.
        message(WARNING "CUDA: ${output}")
        normfuse_no_cuda("${NORMFUSE_NVCC} cannot compile for ${NORMFUSE_CUDA_BUILT_FOR}")
    endif()
    set(NORMFUSE_NVCC_WORKS "${NORMFUSE_NVCC} ${NORMFUSE_GENERAL_FLAGS}" CACHE INTERNAL "")
endif()

# nvcc may be a wrapper elsewhere, but it says which headers are its own.
if(NOT NORMFUSE_CUDA_INCLUDE_DIR)
    execute_process(COMMAND ${NORMFUSE_NVCC} --dryrun -fatbin -x cu ${NORMFUSE_PROBE}.cu -o ${NORMFUSE_PROBE}.fatbin
                    OUTPUT_VARIABLE output ERROR_VARIABLE output)
    string(REGEX MATCHALL "INCLUDES=\"-I[^\"]+\"" own "${output}")
    string(REGEX REPLACE "INCLUDES=\"-I([^\"]+)\"" "\\1" own "${own}")
    find_path(NORMFUSE_CUDA_INCLUDE_DIR cuda.h HINTS ${own} NO_DEFAULT_PATH DOC "Where nvcc's cuda.h is")
    if(NOT NORMFUSE_CUDA_INCLUDE_DIR)
        normfuse_no_cuda("cuda.h was not found beside ${NORMFUSE_NVCC}")
    endif()
endif()

# The assembler file that cmake/<name>.S.in makes, which embeds the files that follow.
function(normfuse_embed name)
    set(made ${PROJECT_BINARY_DIR}/generated/normfuse_${name}.S)
    configure_file(${PROJECT_SOURCE_DIR}/cmake/${name}.S.in ${made} @ONLY)
    set_source_files_properties(${made} PROPERTIES OBJECT_DEPENDS "${ARGN}")
    if(CMAKE_C_COMPILER_ID MATCHES "Clang")
        # It warns of every flag that means nothing to an assembler.
        set_source_files_properties(${made} PROPERTIES COMPILE_OPTIONS "-Wno-unused-command-line-argument")
    endif()
endfunction()

enable_language(ASM)

# ---- what is compiled at run time -----------------------------------------------------------------------------------

file(GLOB NORMFUSE_CUDA_DEVICE_FILES CONFIGURE_DEPENDS
    ${PROJECT_SOURCE_DIR}/src/cuda/device/*.cuh ${PROJECT_SOURCE_DIR}/src/cuda/device/*.h)
set(NORMFUSE_TEXTS "")
set(NORMFUSE_TEXT_POINTERS "")
foreach(file ${NORMFUSE_CUDA_DEVICE_FILES})
    get_filename_component(name ${file} NAME_WE)
    get_filename_component(included ${file} NAME)
    string(APPEND NORMFUSE_TEXTS
        "name_${name}:\n    .asciz \"${included}\"\ntext_${name}:\n    .incbin \"${file}\"\n    .byte 0\n")
    string(APPEND NORMFUSE_TEXT_POINTERS "    .quad name_${name}, text_${name}\n")
endforeach()
normfuse_embed(texts ${NORMFUSE_CUDA_DEVICE_FILES})

# ---- the host side --------------------------------------------------------------------------------------------------

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
    ${PROJECT_BINARY_DIR}/generated/normfuse_texts.S)
list(APPEND NORMFUSE_DEFINITIONS NORMFUSE_HAVE_CUDA)
set(NORMFUSE_HAVE_CUDA ON)
message(STATUS "CUDA: kernels for ${NORMFUSE_CUDA_BUILT_FOR} with ${NORMFUSE_NVCC}")
