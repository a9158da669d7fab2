# The offline part of modelctl: needs no gRPC. Included by CMakeLists.txt of this folder.
modelhost_component(mh_inspect
  SRCS glob.cc index_render.cc inspect.cc offline_files.cc
  DEPS mh_format mh_handle absl::status absl::statusor absl::strings
  PRIVATE_DEPS absl::str_format)
modelhost_test(inspect_test SRCS inspect_test.cc DEPS mh_inspect)
