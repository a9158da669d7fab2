// Implementation of RunAndWait. Include task_runner.h.
#pragma once

#include <cstdlib>
#include <optional>
#include <type_traits>

#include "absl/synchronization/notification.h"
#include "daemon/platform/task_runner.h"

namespace modelhost {

template <typename Function>
auto RunAndWait(ControlLoop& loop, Function function) -> decltype(function()) {
  if (loop.InThread()) std::abort();  // It would wait for itself.
  absl::Notification done;
  using Value = decltype(function());
  if constexpr (std::is_void_v<Value>) {
    loop.Post([&] {
      function();
      done.Notify();
    });
    done.WaitForNotification();
  } else {
    std::optional<Value> value;
    loop.Post([&] {
      value.emplace(function());
      done.Notify();
    });
    done.WaitForNotification();
    return *std::move(value);
  }
}

}  // namespace modelhost
