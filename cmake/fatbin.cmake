# SPDX-License-Identifier: MIT
#
# cmake -DNVCC= -DFLAGS= -DSOURCE= -DOUTPUT= -P fatbin.cmake - compiles one .cu file to a fatbin. What ptxas says of
# registers and spills goes to OUTPUT's neighbour .resources, which tests/check_kernel_resources.py reads; warnings and
# errors are shown.
get_filename_component(folder ${OUTPUT} DIRECTORY)
file(MAKE_DIRECTORY ${folder})
separate_arguments(FLAGS)
execute_process(COMMAND ${NVCC} ${FLAGS} ${SOURCE} -o ${OUTPUT}
                RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
string(REGEX REPLACE "\\.fatbin$" ".resources" resources ${OUTPUT})
file(WRITE ${resources} "${output}")
string(REPLACE ";" "," output "${output}")
string(REPLACE "\n" ";" lines "${output}")
foreach(line ${lines})
    if(NOT line MATCHES "^ptxas info|bytes stack frame")
        message("${line}")
    endif()
endforeach()
if(NOT result EQUAL 0)
    file(REMOVE ${OUTPUT})
    message(FATAL_ERROR "nvcc could not compile ${SOURCE}")
endif()
