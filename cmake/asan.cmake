# The tests under the address and undefined-behaviour sanitizers: `ninja asan` builds them, `ctest -L asan` runs them.
#
# The library and the commands are compiled once more, instrumented and in batches (batches.cmake), for the CPU alone.
# The objects of the tests are those of the build beside: what a sanitizer looks for is in the library. Its archive comes first when a program is linked, and whole, so that of
# each inline function the instrumented body is the one that is kept.
#
# moebius_asan_twin(TARGET OBJECTS LIBRARY...) makes asan/<folder of TARGET>/TARGET of the objects of TARGET and of the object
# library OBJECTS (a body of core/fault.h). Without MOEBIUS_ASAN it does nothing.
if(NOT MOEBIUS_ASAN OR MOEBIUS_SANITIZE OR MOEBIUS_ROOMS OR MOEBIUS_FUZZ)
  set(MOEBIUS_ASAN OFF)
  function(moebius_asan_twin)
  endfunction()
  return()
endif()

# Three checks are left out, which take g++ a sixth of its time. The address sanitizer finds accesses through a null pointer
# and beyond an allocation too. Without null and object-size, nothing finds calls through a null pointer that access nothing,
# and overflows inside an object. Without vptr, nothing finds a cast to the wrong class. The preset fuzz has all checks.
set(MOEBIUS_ASAN_FLAGS -fsanitize=address,undefined -fno-sanitize=null,object-size,vptr
  -fno-omit-frame-pointer -fno-sanitize-recover=all)
function(moebius_asan_library target kind)
  add_library(${target} ${kind} EXCLUDE_FROM_ALL ${ARGN})
  target_include_directories(${target} PUBLIC src)
  target_link_libraries(${target} PUBLIC ${MOEBIUS_DEPENDENCIES})
  target_compile_options(${target} PRIVATE -O1 -g1 ${MOEBIUS_ASAN_FLAGS})
  target_link_options(${target} INTERFACE ${MOEBIUS_ASAN_FLAGS})
endfunction()

set(parts ${MOEBIUS_PARTS})
list(REMOVE_ITEM parts cuda cudnn nccl)
moebius_select(sources ${parts})

# The modules that move numbers and text in loops of their own have the checks of the address sanitizer in place. All others
# call them. The checks are the same, and g++ needs about a sixth less time.
set(checks_by_call $<$<CXX_COMPILER_ID:GNU>:SHELL:--param asan-instrumentation-with-call-threshold=0>)
set(cold ${sources})
list(FILTER cold EXCLUDE REGEX "/src/(comm|data|ops|tokenizer)/")
list(REMOVE_ITEM sources ${cold})
moebius_batches(cold cold_asan 8 ${cold})
# Kernels have the same short names in most of their files, and little of their time goes to headers.
set(kernels ${sources})
list(FILTER kernels INCLUDE REGEX "/src/ops/.*cpu/")
list(REMOVE_ITEM sources ${kernels})
moebius_batches(sources lib_asan 4 ${sources})
moebius_batches(commands cli_asan 3 ${MOEBIUS_CLI_SOURCES})
moebius_asan_library(moebius_cold_asan OBJECT ${cold})
target_compile_options(moebius_cold_asan PRIVATE ${checks_by_call})
moebius_precompile(moebius_cold_asan ${MOEBIUS_COMMON_HEADERS})

moebius_asan_library(moebius_lib_asan STATIC ${sources} ${kernels} $<TARGET_OBJECTS:moebius_cold_asan>)
moebius_precompile(moebius_lib_asan ${MOEBIUS_COMMON_HEADERS})
if(MOEBIUS_HAS_MPI)
  target_link_libraries(moebius_lib_asan PUBLIC $<LINK_ONLY:MPI::MPI_CXX>)
endif()
moebius_asan_library(moebius_cli_asan STATIC ${commands})
target_compile_options(moebius_cli_asan PRIVATE ${checks_by_call})
moebius_precompile(moebius_cli_asan ${MOEBIUS_COMMON_HEADERS})
target_link_libraries(moebius_cli_asan PUBLIC moebius_lib_asan)

add_custom_target(asan)
function(moebius_asan_twin target objects)
  get_target_property(folder ${target} BINARY_DIR)
  cmake_path(RELATIVE_PATH folder BASE_DIRECTORY ${CMAKE_BINARY_DIR})
  add_executable(${target}_asan EXCLUDE_FROM_ALL $<TARGET_OBJECTS:${target}> $<TARGET_OBJECTS:${objects}>)
  set_target_properties(${target}_asan PROPERTIES LINKER_LANGUAGE CXX OUTPUT_NAME ${target}
    RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/asan/${folder})
  target_link_options(${target}_asan PRIVATE
    "LINKER:--whole-archive,$<TARGET_FILE:moebius_lib_asan>,--no-whole-archive")
  target_link_libraries(${target}_asan PRIVATE moebius_lib_asan ${ARGN})
  add_dependencies(asan ${target}_asan)
endfunction()
moebius_asan_twin(moebius moebius_fault_points_none moebius_cli_asan)
moebius_asan_twin(moebius_faults moebius_fault_points moebius_cli_asan)
