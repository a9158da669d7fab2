# modelhostd.toml. Included by daemon/CMakeLists.txt.
modelhost_component(mh_config SRCS config.cc config_view.cc DEPS mh_store mh_http_address)
modelhost_test(config_test SRCS config_test.cc config_view_test.cc DEPS mh_config)
