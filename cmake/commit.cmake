# SPDX-License-Identifier: MIT
#
# Writes OUTPUT, a header that defines NORMFUSE_COMMIT as what git says of SOURCE_DIR. In an archive it is the commit that
# `git archive` wrote here, else "unknown". The file is touched only when the text changes, so nothing is compiled anew
# without need.
set(commit "$Format:%h$")
if(EXISTS ${SOURCE_DIR}/.git)
    execute_process(COMMAND git -C ${SOURCE_DIR} describe --always --dirty --tags
        OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(NOT commit MATCHES "^[^$]+$")
    set(commit unknown)
endif()
set(text "#define NORMFUSE_COMMIT \"${commit}\"\n")
if(EXISTS ${OUTPUT})
    file(READ ${OUTPUT} old)
endif()
if(NOT "${old}" STREQUAL "${text}")
    file(WRITE ${OUTPUT} "${text}")
endif()
