# SPDX-License-Identifier: MIT
#
# `cmake --install` installs libraries, headers, pkg-config file, CMake package, program, man page, completion.
include(CMakePackageConfigHelpers)

set(NORMFUSE_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/normfuse)

set(NORMFUSE_INSTALLED normfuse_static)
if(NORMFUSE_BUILD_SHARED)
    list(APPEND NORMFUSE_INSTALLED normfuse)
endif()
install(TARGETS ${NORMFUSE_INSTALLED} EXPORT normfuse-targets
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(NORMFUSE_BUILD_SHARED)
    install(TARGETS normfuse_onnxruntime LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
install(FILES ${PROJECT_SOURCE_DIR}/include/normfuse.h ${PROJECT_SOURCE_DIR}/include/normfuse.hpp
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})

install(EXPORT normfuse-targets NAMESPACE normfuse:: DESTINATION ${NORMFUSE_CMAKE_DIR})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/normfuse-config.cmake.in
    ${PROJECT_BINARY_DIR}/normfuse-config.cmake INSTALL_DESTINATION ${NORMFUSE_CMAKE_DIR})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/normfuse-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/normfuse-config.cmake ${PROJECT_BINARY_DIR}/normfuse-config-version.cmake
    DESTINATION ${NORMFUSE_CMAKE_DIR})

# Relative to the file itself, so that an installed tree can be moved; absolute directories are kept as given.
foreach(kind LIBDIR INCLUDEDIR)
    if(IS_ABSOLUTE "${CMAKE_INSTALL_${kind}}")
        set(NORMFUSE_PC_${kind} "${CMAKE_INSTALL_${kind}}")
    else()
        set(NORMFUSE_PC_${kind} "\${prefix}/${CMAKE_INSTALL_${kind}}")
    endif()
endforeach()
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
    set(NORMFUSE_PC_PREFIX "${CMAKE_INSTALL_PREFIX}")
else()
    file(RELATIVE_PATH NORMFUSE_PC_UP "/prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/prefix")
    string(REGEX REPLACE "/$" "" NORMFUSE_PC_UP "${NORMFUSE_PC_UP}")
    set(NORMFUSE_PC_PREFIX "\${pcfiledir}/${NORMFUSE_PC_UP}")
endif()
# Libraries for programs that link the static library: pkg-config gives it with --static, and where there is no other library
# in any case.
set(NORMFUSE_PC_LIBS "-L\${libdir} -lnormfuse")
set(NORMFUSE_PC_LIBS_PRIVATE "-lm -lpthread -ldl -Wl,-z,nodelete")
if(NOT NORMFUSE_BUILD_SHARED)
    string(APPEND NORMFUSE_PC_LIBS " ${NORMFUSE_PC_LIBS_PRIVATE}")
    set(NORMFUSE_PC_LIBS_PRIVATE "")
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/normfuse.pc.in ${PROJECT_BINARY_DIR}/normfuse.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/normfuse.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

if(TARGET normfuse_program)
    install(TARGETS normfuse_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
    install(FILES ${PROJECT_SOURCE_DIR}/docs/normfuse.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
    # The completions know the activations of src/activations.def.
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS src/activations.def)
    file(STRINGS ${PROJECT_SOURCE_DIR}/src/activations.def activations REGEX "^ACTIVATION\\(")
    list(TRANSFORM activations REPLACE "^ACTIVATION\\([A-Z0-9_]+, ([a-z0-9_]+),.*" "\\1")
    list(JOIN activations " " NORMFUSE_ACTIVATIONS)
    list(JOIN activations "," NORMFUSE_ACTIVATION_LIST)
    foreach(completion normfuse.bash _normfuse)
        configure_file(${PROJECT_SOURCE_DIR}/cli/completion/${completion}.in
                       ${PROJECT_BINARY_DIR}/generated/completion/${completion} @ONLY)
    endforeach()
    install(FILES ${PROJECT_BINARY_DIR}/generated/completion/normfuse.bash
        DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME normfuse)
    install(FILES ${PROJECT_BINARY_DIR}/generated/completion/_normfuse
        DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
endif()
