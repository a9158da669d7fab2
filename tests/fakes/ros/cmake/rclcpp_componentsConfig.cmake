# The fake of tests/fakes/ros, by the names that real ROS 2 exports.
include_guard()
add_library(rclcpp_components::component INTERFACE IMPORTED)
target_include_directories(rclcpp_components::component INTERFACE ${CMAKE_CURRENT_LIST_DIR}/../include)

# The real one makes a program, too, and registers at the end of ament_package().
macro(rclcpp_components_register_node target)
  cmake_parse_arguments(_register "" "PLUGIN;EXECUTABLE;EXECUTOR;RESOURCE_INDEX" "" ${ARGN})
  if(NOT TARGET ${target} OR NOT _register_PLUGIN OR NOT _register_EXECUTABLE OR
     _register_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "rclcpp_components_register_node: TARGET PLUGIN class EXECUTABLE name")
  endif()
  ament_index_register_resource(rclcpp_components
    CONTENT "${_register_PLUGIN};lib/$<TARGET_FILE_NAME:${target}>\n")
endmacro()
