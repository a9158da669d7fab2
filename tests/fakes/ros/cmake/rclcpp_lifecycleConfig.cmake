# The fake of tests/fakes/ros, by the names that real ROS 2 exports.
include_guard()
add_library(rclcpp::rclcpp INTERFACE IMPORTED)
target_include_directories(rclcpp::rclcpp INTERFACE ${CMAKE_CURRENT_LIST_DIR}/../include)
add_library(rclcpp_lifecycle::rclcpp_lifecycle INTERFACE IMPORTED)
target_link_libraries(rclcpp_lifecycle::rclcpp_lifecycle INTERFACE rclcpp::rclcpp)
