# With MODELHOST_UNITY the files of a target are compiled as one: most of the time of a compile goes
# into the same headers again. Names in unnamed namespaces must then be unique in their folder.
function(modelhost_unity name)
  if(MODELHOST_UNITY)
    set_target_properties(${name} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
  endif()
endfunction()

# One folder = one library target. Files are listed, never globbed.
#   modelhost_component(name SRCS ... DEPS ... PRIVATE_DEPS ...)
function(modelhost_component name)
  cmake_parse_arguments(C "" "" "SRCS;DEPS;PRIVATE_DEPS" ${ARGN})
  add_library(${name} STATIC ${C_SRCS})
  target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PUBLIC ${C_DEPS} PRIVATE ${C_PRIVATE_DEPS})
  modelhost_unity(${name})
endfunction()

# Under ThreadSanitizer a program's absl locks go through tests/tsan_absl.cc.
function(modelhost_show_locks_to_tsan name)
  if(NOT MODELHOST_SANITIZE MATCHES "thread")
    return()
  endif()
  file(STRINGS ${PROJECT_SOURCE_DIR}/tests/tsan_absl.cc wrapped REGEX "__real__ZNK?[0-9]")
  list(TRANSFORM wrapped REPLACE ".*__real_(_ZNK?[0-9A-Za-z_]+).*" "\\1")
  list(REMOVE_DUPLICATES wrapped)
  list(TRANSFORM wrapped PREPEND "LINKER:--wrap=")
  target_sources(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests/tsan_absl.cc)
  target_link_options(${name} PRIVATE ${wrapped})
  # For programs that use no absl of their own.
  target_link_libraries(${name} PRIVATE absl::synchronization absl::time)
endfunction()

# Unit tests beside their code, in one program that ctest runs with a limit of its own. Compiling
# them is most of what building costs, and most of that goes into the same headers: the files of a
# folder are one program where they need nothing of their own, and one translation unit.
#   modelhost_test(name SRCS ... DEPS ... [LABELS ...] [TIMEOUT seconds] [SHARDS n] [SINGLE_THREADED])
# SHARDS: ctest runs it as so many processes, each with its share of the tests (name.1, name.2, ...).
# SINGLE_THREADED: neither the test nor what it tests has a second thread, so that ThreadSanitizer
# has nothing to look at. `scale` measures cost, which sanitizers change. Neither is built for nothing.
function(modelhost_test name)
  cmake_parse_arguments(T "SINGLE_THREADED" "TIMEOUT;SHARDS" "SRCS;DEPS;LABELS" ${ARGN})
  if(NOT MODELHOST_TESTS)
    return()
  endif()
  if(T_SINGLE_THREADED AND MODELHOST_SANITIZE MATCHES "thread")
    return()
  endif()
  if("scale" IN_LIST T_LABELS AND MODELHOST_SANITIZE)
    return()
  endif()
  if(NOT T_TIMEOUT)
    set(T_TIMEOUT 120)
  endif()
  if(NOT T_LABELS)
    set(T_LABELS unit)
  endif()
  add_executable(${name} ${T_SRCS})
  target_link_libraries(${name} PRIVATE ${T_DEPS} GTest::gtest GTest::gmock GTest::gtest_main)
  # Tests are most of what there is to compile. The code under test is optimised and checked as ever.
  target_compile_options(${name} PRIVATE -O0)
  if(MODELHOST_SANITIZE MATCHES "undefined")
    target_compile_options(${name} PRIVATE -fno-sanitize=undefined)
  endif()
  modelhost_unity(${name})
  modelhost_show_locks_to_tsan(${name})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  if(NOT T_SHARDS)
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES TIMEOUT ${T_TIMEOUT} LABELS "${T_LABELS}")
    return()
  endif()
  foreach(shard RANGE 1 ${T_SHARDS})
    math(EXPR index "${shard} - 1")
    add_test(NAME ${name}.${shard} COMMAND ${name})
    set_tests_properties(${name}.${shard} PROPERTIES TIMEOUT ${T_TIMEOUT} LABELS "${T_LABELS}"
      ENVIRONMENT "GTEST_TOTAL_SHARDS=${T_SHARDS};GTEST_SHARD_INDEX=${index}")
  endforeach()
endfunction()

# A fuzzer (LLVMFuzzerTestOneInput). With libFuzzer it explores; otherwise a small main replays and
# mutates the seeds, so that it runs under any compiler: with sanitizers, or in a debug build.
#   modelhost_fuzzer(name SRCS ... DEPS ... SEEDS dir)
function(modelhost_fuzzer name)
  cmake_parse_arguments(F "" "SEEDS" "SRCS;DEPS" ${ARGN})
  # They have one thread.
  if(NOT MODELHOST_TESTS OR MODELHOST_SANITIZE MATCHES "thread" OR
     (NOT MODELHOST_SANITIZE AND NOT CMAKE_BUILD_TYPE STREQUAL "Debug"))
    return()
  endif()
  add_executable(${name} ${F_SRCS})
  target_link_libraries(${name} PRIVATE ${F_DEPS})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/fuzz)
  if(MODELHOST_LIBFUZZER)
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  else()
    if(NOT TARGET mh_fuzz_replay)
      add_library(mh_fuzz_replay OBJECT ${PROJECT_SOURCE_DIR}/tests/fuzz_replay_main.cc)
    endif()
    target_link_libraries(${name} PRIVATE mh_fuzz_replay)
    add_test(NAME ${name} COMMAND ${name} --runs=2000 ${F_SEEDS})
    set_tests_properties(${name} PROPERTIES TIMEOUT 120 LABELS "fuzz")
  endif()
  set_property(GLOBAL APPEND PROPERTY MODELHOST_FUZZERS "${name}")
  get_filename_component(seeds "${F_SEEDS}" ABSOLUTE)
  set_property(GLOBAL APPEND PROPERTY MODELHOST_FUZZER_SEEDS "${name} ${seeds}\n")
endfunction()
