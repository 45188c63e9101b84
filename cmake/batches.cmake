# Batches: sources that include several sources each. Most of the time of g++ goes to headers and templates, which a batch
# reads once. They are for builds that serve tests only. The program is compiled from its sources one by one, so that a
# change compiles one of them, and so that each of them is seen to include what it uses.
#
# moebius_batches(RESULT NAME SIZE SOURCE...) returns batches of about SIZE sources in place of those that have the same
# properties, and leaves all others alone. tools/batches.py decides before each build which sources may share a batch.
find_program(MOEBIUS_PYTHON python3 DOC "Python; with torch and transformers it loads what Moebius exports")
file(GLOB_RECURSE MOEBIUS_HEADERS CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/*.h)

function(moebius_batches result name size)
  if(NOT MOEBIUS_PYTHON)
    set(${result} ${ARGN} PARENT_SCOPE)
    return()
  endif()
  set(properties COMPILE_OPTIONS COMPILE_DEFINITIONS INCLUDE_DIRECTORIES)
  set(groups "")
  foreach(source ${ARGN})
    set(key "")
    foreach(property ${properties})
      get_source_file_property(value ${source} ${property})
      string(APPEND key "${property}=${value}\n")
    endforeach()
    string(MD5 group "${key}")
    list(APPEND groups ${group})
    list(APPEND sources_${group} ${source})
  endforeach()
  list(REMOVE_DUPLICATES groups)
  set(found "")
  set(number 0)
  foreach(group ${groups})
    set(sources ${sources_${group}})
    list(LENGTH sources length)
    if(length LESS_EQUAL size)
      list(APPEND found ${sources})
      continue()
    endif()
    math(EXPR number "${number} + 1")
    math(EXPR count "${length} * 5 / (${size} * 4) + 4")  # some have fewer sources, where names collide
    set(folder ${CMAKE_BINARY_DIR}/batches/${name}${number})
    set(batches "")
    foreach(index RANGE 1 ${count})
      list(APPEND batches ${folder}/${index}.cc)
    endforeach()
    list(JOIN sources "\n" lines)
    file(CONFIGURE OUTPUT ${folder}/sources.txt CONTENT "${lines}\n")
    add_custom_command(OUTPUT ${batches}
      COMMAND ${MOEBIUS_PYTHON} ${CMAKE_SOURCE_DIR}/tools/batches.py ${size} ${folder}/sources.txt ${batches}
      DEPENDS ${CMAKE_SOURCE_DIR}/tools/batches.py ${folder}/sources.txt ${sources} ${MOEBIUS_HEADERS}
      COMMENT "Distributing sources over batches/${name}${number}" VERBATIM)
    list(GET sources 0 first)
    foreach(property ${properties})
      get_source_file_property(value ${first} ${property})
      if(value)
        set_property(SOURCE ${batches} PROPERTY ${property} ${value})
      endif()
    endforeach()
    # The release build has the warnings of each source. In a batch some are wrong: g++ takes its sources for headers, in
    # which no class should have a member of a type that each file has anew.
    set_property(SOURCE ${batches} APPEND PROPERTY COMPILE_OPTIONS -w)
    list(APPEND found ${batches})
  endforeach()
  set(${result} ${found} PARENT_SCOPE)
endfunction()
