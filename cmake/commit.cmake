# SPDX-License-Identifier: MIT
#
# Writes OUTPUT, a header that defines NORMFUSE_COMMIT as what git says of SOURCE_DIR, or "unknown" outside a checkout.
# The file is touched only when the text changes, so nothing is compiled anew without need.
execute_process(COMMAND git -C ${SOURCE_DIR} describe --always --dirty --tags
    OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE status)
if(NOT status EQUAL 0 OR NOT EXISTS ${SOURCE_DIR}/.git)
    set(commit unknown)
endif()
set(text "#define NORMFUSE_COMMIT \"${commit}\"\n")
if(EXISTS ${OUTPUT})
    file(READ ${OUTPUT} old)
endif()
if(NOT "${old}" STREQUAL "${text}")
    file(WRITE ${OUTPUT} "${text}")
endif()
