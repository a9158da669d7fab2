// A fake of the macro that makes a node loadable: it checks what the real one's factory asks of a
// class, and registers nothing.
#pragma once

#include <memory>
#include <rclcpp/rclcpp.hpp>
#include <type_traits>
#include <utility>

#define RCLCPP_COMPONENTS_REGISTER_NODE(NodeClass)                                             \
  static_assert(std::is_constructible_v<NodeClass, const rclcpp::NodeOptions&>,                \
                "a component is made from its NodeOptions");                                   \
  static_assert(std::is_same_v<decltype(std::declval<NodeClass&>().get_node_base_interface()), \
                               rclcpp::node_interfaces::NodeBaseInterface::SharedPtr>,         \
                "a component has a base interface");
