# Selects the files of src/ to build. The name of a folder says what its files need:
#   cuda/   the CUDA toolkit, any GPU              sm80/   the CUDA toolkit, and compute capability 8.0
#                                                  sm90/   the CUDA toolkit, and Hopper's own instructions
#   cudnn/  cuDNN and the headers of its frontend  nccl/   NCCL's header        mpi/  an MPI
# Where that is missing, missing_<name>.cc beside the folder is built instead. missing_cuda.cc
# replaces cuda/, sm80/ and sm90/.
# Sets MOEBIUS_LIBRARY_SOURCES, MOEBIUS_CLI_SOURCES (the commands) and MOEBIUS_TEST_SOURCES.
set(MOEBIUS_GLOB src/*.cc)
if(MOEBIUS_ROOMS)
  list(TRANSFORM MOEBIUS_ROOMS REPLACE "(.+)" "src/\\1/*.cc" OUTPUT_VARIABLE MOEBIUS_GLOB)
endif()
file(GLOB_RECURSE MOEBIUS_SOURCES CONFIGURE_DEPENDS ${MOEBIUS_GLOB})
set(MOEBIUS_TEST_SOURCES ${MOEBIUS_SOURCES})
list(FILTER MOEBIUS_TEST_SOURCES INCLUDE REGEX "_test\\.cc$")
if(MOEBIUS_UNTESTED_ROOMS)
  list(TRANSFORM MOEBIUS_UNTESTED_ROOMS REPLACE "(.+)" "src/\\1/*.cc" OUTPUT_VARIABLE MOEBIUS_GLOB)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${MOEBIUS_GLOB})
  list(APPEND MOEBIUS_SOURCES ${sources})
endif()
list(FILTER MOEBIUS_SOURCES EXCLUDE REGEX "(_test|/main|/fault_points|/fault_points_none)\\.cc$")
file(GLOB_RECURSE MOEBIUS_KERNELS CONFIGURE_DEPENDS src/*.cu)

# moebius_select(RESULT NAME...): returns the sources of a library that has these of cuda, cudnn,
# nccl and mpi, and stand-ins for the others.
function(moebius_select result)
  set(found ${MOEBIUS_SOURCES})
  set(stand_ins ${found})
  list(FILTER stand_ins INCLUDE REGEX "/missing_cuda\\.cc$")
  list(REMOVE_ITEM found ${stand_ins})
  if("cuda" IN_LIST ARGN)
    list(APPEND found ${MOEBIUS_KERNELS})
  else()
    list(FILTER found EXCLUDE REGEX "/(cuda|sm80|sm90)/[^/]+$")
  endif()
  foreach(stand_in ${stand_ins})  # also with CUDA, for ops whose kernels are not written yet
    cmake_path(GET stand_in PARENT_PATH folder)
    set(backend ${found})
    list(FILTER backend INCLUDE REGEX "^${folder}/(cuda|sm80|sm90)/[^/]+$")
    if(NOT backend)
      list(APPEND found ${stand_in})
    endif()
  endforeach()
  foreach(name cudnn nccl mpi)
    if("${name}" IN_LIST ARGN)
      list(FILTER found EXCLUDE REGEX "/missing_${name}\\.cc$")
    else()
      list(FILTER found EXCLUDE REGEX "/${name}/[^/]+$")
    endif()
  endforeach()
  set(${result} ${found} PARENT_SCOPE)
endfunction()

# The commands are a separate library, whose precompiled header is the parser of arguments.
set(MOEBIUS_CLI_SOURCES ${MOEBIUS_SOURCES})
list(FILTER MOEBIUS_CLI_SOURCES INCLUDE REGEX "/src/cli/")
list(REMOVE_ITEM MOEBIUS_SOURCES ${MOEBIUS_CLI_SOURCES})
set(MOEBIUS_PARTS "")
foreach(name cuda cudnn nccl mpi)
  string(TOUPPER ${name} upper)
  if(MOEBIUS_HAS_${upper})
    list(APPEND MOEBIUS_PARTS ${name})
  endif()
endforeach()
moebius_select(MOEBIUS_LIBRARY_SOURCES ${MOEBIUS_PARTS})

# moebius_sources_in(RESULT FOLDER...): returns the library's sources in folders of these names.
function(moebius_sources_in result)
  list(JOIN ARGN "|" names)
  set(found ${MOEBIUS_LIBRARY_SOURCES})
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
