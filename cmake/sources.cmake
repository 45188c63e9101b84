# Selects the files of src/ to build. The name of a folder says what its files need:
#   cuda/   the CUDA toolkit, any GPU              sm90/   the CUDA toolkit, and Hopper's own instructions
#   cudnn/  cuDNN and the headers of its frontend  nccl/   NCCL's header        mpi/  an MPI
# Where that is missing, missing_<name>.cc beside the folder is built instead. missing_cuda.cc
# replaces cuda/ and sm90/.
# Sets MOEBIUS_SOURCES (the library), MOEBIUS_CLI_SOURCES (the commands) and MOEBIUS_TEST_SOURCES.
set(MOEBIUS_GLOB src/*.cc)
if(MOEBIUS_ROOMS)
  list(TRANSFORM MOEBIUS_ROOMS REPLACE "(.+)" "src/\\1/*.cc" OUTPUT_VARIABLE MOEBIUS_GLOB)
endif()
file(GLOB_RECURSE MOEBIUS_SOURCES CONFIGURE_DEPENDS ${MOEBIUS_GLOB})
set(MOEBIUS_TEST_SOURCES ${MOEBIUS_SOURCES})
list(FILTER MOEBIUS_TEST_SOURCES INCLUDE REGEX "_test\\.cc$")
list(FILTER MOEBIUS_SOURCES EXCLUDE REGEX "(_test|/main|/fault_points|/fault_points_none)\\.cc$")
set(MOEBIUS_STAND_INS ${MOEBIUS_SOURCES})
list(FILTER MOEBIUS_STAND_INS INCLUDE REGEX "/missing_cuda\\.cc$")
list(REMOVE_ITEM MOEBIUS_SOURCES ${MOEBIUS_STAND_INS})
if(MOEBIUS_HAS_CUDA)
  file(GLOB_RECURSE MOEBIUS_KERNELS CONFIGURE_DEPENDS src/*.cu)
  list(APPEND MOEBIUS_SOURCES ${MOEBIUS_KERNELS})
else()
  list(FILTER MOEBIUS_SOURCES EXCLUDE REGEX "/(cuda|sm90)/[^/]+$")
endif()
foreach(stand_in ${MOEBIUS_STAND_INS})  # also with CUDA, for ops whose kernels are not written yet
  cmake_path(GET stand_in PARENT_PATH folder)
  set(backend ${MOEBIUS_SOURCES})
  list(FILTER backend INCLUDE REGEX "^${folder}/(cuda|sm90)/[^/]+$")
  if(NOT backend)
    list(APPEND MOEBIUS_SOURCES ${stand_in})
  endif()
endforeach()
foreach(name cudnn nccl mpi)
  string(TOUPPER ${name} upper)
  if(MOEBIUS_HAS_${upper})
    list(FILTER MOEBIUS_SOURCES EXCLUDE REGEX "/missing_${name}\\.cc$")
  else()
    list(FILTER MOEBIUS_SOURCES EXCLUDE REGEX "/${name}/[^/]+$")
  endif()
endforeach()

# The commands are a separate library, whose precompiled header is the parser of arguments.
set(MOEBIUS_CLI_SOURCES ${MOEBIUS_SOURCES})
list(FILTER MOEBIUS_CLI_SOURCES INCLUDE REGEX "/src/cli/")
list(REMOVE_ITEM MOEBIUS_SOURCES ${MOEBIUS_CLI_SOURCES})

# moebius_sources_in(RESULT FOLDER...): returns the library's sources in folders of these names.
function(moebius_sources_in result)
  list(JOIN ARGN "|" names)
  set(found ${MOEBIUS_SOURCES})
  list(FILTER found INCLUDE REGEX "/(${names})/[^/]+$")
  set(${result} ${found} PARENT_SCOPE)
endfunction()

# Adds include folders as system folders, so that their headers compile without the project's
# warnings.
function(moebius_system_includes sources)
  foreach(folder ${ARGN})
    set_property(SOURCE ${${sources}} APPEND PROPERTY COMPILE_OPTIONS -isystem ${folder})
  endforeach()
endfunction()
