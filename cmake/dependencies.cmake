# The libraries of the CPU build. All missing ones are listed together, with the Debian package of
# each.
# Sets MOEBIUS_DEPENDENCIES (for the library) and MOEBIUS_TEST_DEPENDENCIES (for the tests).
find_package(Threads REQUIRED)
find_package(PkgConfig QUIET)
set(MOEBIUS_MISSING "")

macro(moebius_need library debian)
  if(NOT ${library}_FOUND)
    string(APPEND MOEBIUS_MISSING "\n  ${library}, Debian package ${debian}")
    string(APPEND MOEBIUS_MISSING_PACKAGES " ${debian}")
  endif()
endmacro()
macro(moebius_find library debian)
  find_package(${library} QUIET)
  moebius_need(${library} ${debian})
endmacro()
macro(moebius_find_module library module debian)
  if(PKG_CONFIG_FOUND)
    pkg_check_modules(${library} QUIET IMPORTED_TARGET ${module})
  endif()
  moebius_need(${library} ${debian})
endmacro()

moebius_need(PKG_CONFIG pkg-config)
# oneDNN's CMake package is not used: that of Debian requires the OpenCL headers, which nothing here
# needs.
find_path(DNNL_INCLUDE_DIR oneapi/dnnl/dnnl.hpp)
find_library(DNNL_LIBRARY dnnl)
if(DNNL_INCLUDE_DIR AND DNNL_LIBRARY)
  set(oneDNN_FOUND TRUE)
  add_library(DNNL::dnnl UNKNOWN IMPORTED)
  set_target_properties(DNNL::dnnl PROPERTIES
    IMPORTED_LOCATION ${DNNL_LIBRARY} INTERFACE_INCLUDE_DIRECTORIES ${DNNL_INCLUDE_DIR})
endif()
moebius_need(oneDNN libdnnl-dev)
moebius_find(fmt libfmt-dev)
moebius_find(nlohmann_json nlohmann-json3-dev)
moebius_find(tomlplusplus libtomlplusplus-dev)
moebius_find(CLI11 libcli11-dev)
moebius_find_module(ZSTD libzstd libzstd-dev)
moebius_find_module(XXHASH libxxhash libxxhash-dev)
moebius_find_module(PCRE2 libpcre2-8 libpcre2-dev)
moebius_find_module(UTF8PROC libutf8proc libutf8proc-dev)
moebius_find_module(SIMDJSON simdjson libsimdjson-dev)
moebius_find_module(HTTPLIB cpp-httplib libcpp-httplib-dev)
moebius_find_module(CRYPTO libcrypto libssl-dev)
find_package(OpenMP QUIET COMPONENTS CXX)
moebius_need(OpenMP_CXX "g++ (libomp-14-dev with clang)")
set(MOEBIUS_DEPENDENCIES Threads::Threads DNNL::dnnl fmt::fmt nlohmann_json::nlohmann_json tomlplusplus::tomlplusplus
  CLI11::CLI11 PkgConfig::ZSTD PkgConfig::XXHASH PkgConfig::PCRE2 PkgConfig::UTF8PROC OpenMP::OpenMP_CXX)
# The room report alone includes the first two, and comm the third too. Their definitions are given to the
# files of report only, so that all other files compile in the same way without them.
set(MOEBIUS_REPORT_DEPENDENCIES PkgConfig::SIMDJSON PkgConfig::HTTPLIB PkgConfig::CRYPTO)
foreach(library ${MOEBIUS_REPORT_DEPENDENCIES})
  list(APPEND MOEBIUS_DEPENDENCIES $<LINK_ONLY:${library}>)
endforeach()

if(MOEBIUS_TESTS)
  moebius_find(GTest libgtest-dev)
  if(GTest_FOUND AND NOT TARGET GTest::gmock)
    set(GMock_FOUND FALSE)
    moebius_need(GMock libgmock-dev)
  endif()
  moebius_find(rapidcheck librapidcheck-dev)
  set(MOEBIUS_TEST_DEPENDENCIES GTest::gmock GTest::gtest GTest::gtest_main rapidcheck rapidcheck_gtest)
endif()

if(MOEBIUS_MISSING)
  message(FATAL_ERROR "libraries that the build needs are missing:${MOEBIUS_MISSING}\n"
    "`./dev setup` installs them; by hand: apt-get install${MOEBIUS_MISSING_PACKAGES}\n")
endif()
