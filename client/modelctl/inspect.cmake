# The offline part of modelctl: needs no gRPC. Included by CMakeLists.txt of this folder.
modelhost_component(mh_inspect
  SRCS glob.cc index_render.cc inspect.cc model_source.cc offline_files.cc small_file.cc
       source_reach.cc
  DEPS mh_format mh_handle absl::status absl::statusor absl::strings
  PRIVATE_DEPS absl::str_format)
modelhost_test(inspect_test SRCS inspect_test.cc DEPS mh_inspect)

modelhost_component(mh_import
  SRCS gguf_writer.cc import.cc import_metadata.cc import_plan.cc output_file.cc q8_0.cc recoder.cc
       safetensors_writer.cc strided_gather.cc tensor_convert.cc tensor_reader.cc value_check.cc
  DEPS mh_inspect mh_format mh_handle mh_abi absl::flat_hash_map absl::status absl::statusor
       absl::strings)
modelhost_test(import_test
  SRCS import_plan_test.cc import_test.cc import_faults_test.cc output_file_test.cc
       tensor_convert_test.cc tensor_reader_test.cc value_check_test.cc
  DEPS mh_import mh_format mh_handle TIMEOUT 300)
