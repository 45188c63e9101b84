# cuDNN and the headers of its frontend, for fused attention (src/ops/attention/cudnn/attention.cc).
# Both are optional.
# Without them, or with a cuDNN other than 9.19, attention has our own kernels only
# (src/ops/attention/missing_cudnn.cc).
# The places to look are MOEBIUS_CUDNN_ROOT, the CUDA toolkit, the system, and the wheels of the
# first python3 of the PATH.
# Sets MOEBIUS_HAS_CUDNN and, where it is true, the target MOEBIUS::cudnn.
set(MOEBIUS_HAS_CUDNN FALSE)
set(MOEBIUS_CUDNN_ROOT "" CACHE PATH "where to look for cuDNN and cudnn_frontend.h first")
find_program(MOEBIUS_PYTHON python3)
if(MOEBIUS_PYTHON)
  execute_process(COMMAND ${MOEBIUS_PYTHON} -c "import sysconfig; print(sysconfig.get_path('purelib'))"
    OUTPUT_VARIABLE MOEBIUS_WHEELS OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
set(MOEBIUS_CUDNN_HINTS ${MOEBIUS_CUDNN_ROOT} ${CMAKE_SOURCE_DIR}/build/wheels ${CUDAToolkit_LIBRARY_ROOT} /usr/local/cuda ${MOEBIUS_WHEELS}/nvidia/cudnn)
find_path(CUDNN_INCLUDE_DIR cudnn.h HINTS ${MOEBIUS_CUDNN_HINTS} PATH_SUFFIXES include)
find_library(CUDNN_LIBRARY NAMES cudnn libcudnn.so.9 HINTS ${MOEBIUS_CUDNN_HINTS} PATH_SUFFIXES lib lib64)
find_path(CUDNN_FRONTEND_INCLUDE_DIR cudnn_frontend.h HINTS ${MOEBIUS_CUDNN_ROOT} ${CMAKE_SOURCE_DIR}/build/wheels ${MOEBIUS_WHEELS}
  PATH_SUFFIXES include)

set(MOEBIUS_CUDNN_MISSING "")
if(CUDNN_INCLUDE_DIR AND EXISTS ${CUDNN_INCLUDE_DIR}/cudnn_version.h)
  file(STRINGS ${CUDNN_INCLUDE_DIR}/cudnn_version.h version REGEX "^#define CUDNN_(MAJOR|MINOR) ")
  string(REGEX REPLACE "[^0-9]*([0-9]+)[^0-9]*;[^0-9]*([0-9]+).*" "\\1.\\2" version "${version}")
endif()
if(NOT CUDNN_INCLUDE_DIR OR NOT CUDNN_LIBRARY)
  string(APPEND MOEBIUS_CUDNN_MISSING "\n  cuDNN 9.19 (Debian package libcudnn9-dev-cuda-13, wheel nvidia-cudnn-cu13==9.19.*)")
elseif(version VERSION_LESS 9.12)
  string(APPEND MOEBIUS_CUDNN_MISSING "\n  cuDNN 9.19; found ${version} in ${CUDNN_INCLUDE_DIR}")
endif()
if(NOT CUDNN_FRONTEND_INCLUDE_DIR)
  string(APPEND MOEBIUS_CUDNN_MISSING "\n  cudnn_frontend.h (wheel nvidia-cudnn-frontend: its folder include/)")
endif()
if(MOEBIUS_CUDNN_MISSING)
  message(STATUS "cuDNN: attention runs on our own kernels only (Hopper's at head widths 64, 128 and latent 192/128, "
    "portable ones otherwise); what is missing for cuDNN's beside them:"
    "${MOEBIUS_CUDNN_MISSING}\n  Install them, or name their folder: -DMOEBIUS_CUDNN_ROOT=FOLDER")
  return()
endif()
set(use "")
if(NOT version VERSION_EQUAL 9.19) # is_measured_cudnn of src/ops/attention/cuda/attention.h
  set(use " (not used: attention uses only 9.19)")
endif()
string(REPLACE "${CMAKE_SOURCE_DIR}/" "" shown "${CUDNN_FRONTEND_INCLUDE_DIR}")
message(STATUS "cuDNN: ${version}${use}, ${CUDNN_LIBRARY}; frontend headers in ${shown}")
add_library(MOEBIUS::cudnn INTERFACE IMPORTED)
target_include_directories(MOEBIUS::cudnn SYSTEM INTERFACE ${CUDNN_INCLUDE_DIR} ${CUDNN_FRONTEND_INCLUDE_DIR})
target_link_libraries(MOEBIUS::cudnn INTERFACE ${CUDNN_LIBRARY} CUDA::nvrtc)
set(MOEBIUS_HAS_CUDNN TRUE)
