// Many threads that load, unload, swap and roll back the same few versions at once, each with a
// connection of its own, and count how every operation ended.
//
//   mixed_operations --runtime-dir=D --models=m0,m1 --versions=4 --threads=32 --operations=1000
//
// Every model has the versions 1 to N. A call that is refused because there are too many is made
// again a little later. Prints one JSON object: counts by kind and outcome, and the outcomes that
// nobody should see (a code outside the list below, or one without a reason and a text), with the
// first of them in full. Exits 1 when there are any.
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "modelhost/v1/error_info.pb.h"
#include "tests/stress/stress_util.h"

namespace modelhost::bench {
namespace {

// What two operators that work against each other may be told. Everything else, UNKNOWN and
// INTERNAL above all, is a fault.
constexpr std::array kAllowed = {
    grpc::StatusCode::OK,
    grpc::StatusCode::FAILED_PRECONDITION,  // It has a label, is held by a swap, has no previous.
    grpc::StatusCode::ABORTED,              // Superseded: wanted again, or another one moved it.
    grpc::StatusCode::CANCELLED,            // A load that was given up because of an unload.
    grpc::StatusCode::RESOURCE_EXHAUSTED,   // No room, or too many calls at once.
};

constexpr int kMostTries = 5000;

enum Kind { kLoad, kUnload, kSwap, kSwapSet, kRollback, kKinds };
constexpr std::array kNames = {"load", "unload", "swap", "swap_set", "rollback"};

struct Counts {
  std::mutex mutex;
  std::map<std::string, uint64_t> outcomes;  // "swap OK"
  uint64_t bad = 0;
  std::string first_bad;
  uint64_t unfinished = 0;  // Streams that ended without a finished operation.
};

std::string NameOf(int code) {
  static const std::array names = {"OK",
                                   "CANCELLED",
                                   "UNKNOWN",
                                   "INVALID_ARGUMENT",
                                   "DEADLINE_EXCEEDED",
                                   "NOT_FOUND",
                                   "ALREADY_EXISTS",
                                   "PERMISSION_DENIED",
                                   "RESOURCE_EXHAUSTED",
                                   "FAILED_PRECONDITION",
                                   "ABORTED",
                                   "OUT_OF_RANGE",
                                   "UNIMPLEMENTED",
                                   "INTERNAL",
                                   "UNAVAILABLE",
                                   "DATA_LOSS",
                                   "UNAUTHENTICATED"};
  return code >= 0 && static_cast<size_t>(code) < names.size() ? names[static_cast<size_t>(code)]
                                                               : std::to_string(code);
}

// A refused call says why in a form for programs.
bool HasReason(const grpc::Status& status) {
  v1::RpcStatus rich;
  v1::ErrorInfo info;
  return rich.ParseFromString(status.error_details()) && rich.details_size() == 1 &&
         info.ParseFromString(rich.details(0).value()) && info.domain() == "modelhost" &&
         !info.reason().empty();
}

class Operator {
 public:
  Operator(const std::string& runtime_dir, std::vector<std::string> models, uint64_t versions,
           uint64_t seed, Counts& counts)
      : stub_(ControlStub(runtime_dir)),
        models_(std::move(models)),
        versions_(versions),
        random_(seed),
        counts_(counts) {}

  void Run(int operations) {
    for (int i = 0; i < operations; ++i) {
      const std::mt19937_64 dice = random_;
      for (int tries = 0; !One(tries < kMostTries); ++tries) {
        random_ = dice;  // The same operation again.
        Pause(2'000'000);
      }
    }
  }

 private:
  uint64_t Any(uint64_t below) { return random_() % below; }
  const std::string& Model() { return models_[Any(models_.size())]; }
  uint64_t Version() { return 1 + Any(versions_); }

  // False: the call was refused for now, and is not counted, as `again` allows.
  bool One(bool again) {
    const auto kind = static_cast<Kind>(Any(kKinds));
    grpc::ClientContext context;
    SetDeadline(context, 120);
    v1::Operation last;
    grpc::Status status;
    switch (kind) {
      case kLoad: {
        v1::LoadRequest request;
        request.set_model(Model());
        request.set_version(Version());
        status = LastOf(*stub_->Load(&context, request), &last);
        break;
      }
      case kUnload: {
        v1::UnloadRequest request;
        request.set_model(Model());
        request.set_version(Version());
        // Readers hold leases; an operator who does not want to wait says so.
        request.mutable_drain_timeout()->set_nanos(50'000'000);
        request.set_release_on_deadline(Any(2) == 0);
        status = LastOf(*stub_->Unload(&context, request), &last);
        break;
      }
      case kSwap:
      case kSwapSet: {
        v1::SwapRequest request;
        for (const std::string& model : models_) {
          if (kind == kSwap && request.targets_size() == 1) break;
          v1::SwapTarget* target = request.add_targets();
          target->set_model(kind == kSwap ? Model() : model);
          target->set_version(Version());
        }
        if (Any(4) == 0) request.set_if_current(Version());
        status = LastOf(*stub_->Swap(&context, request), &last);
        break;
      }
      default: {
        v1::RollbackRequest request;
        request.set_model(Model());
        status = LastOf(*stub_->Rollback(&context, request), &last);
      }
    }
    if (again && status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED && HasReason(status)) {
      return false;
    }
    Count(kind, status, last);
    return true;
  }

  void Count(Kind kind, const grpc::Status& status, const v1::Operation& last) {
    int code = status.error_code();
    std::string text = status.error_message();
    bool good = status.ok() || HasReason(status);
    if (status.ok() && last.state() != v1::SUCCEEDED) {
      code = last.failure().code();
      text = last.failure().message();
      good = last.state() == v1::OPERATION_FAILED || last.state() == v1::CANCELLED ||
             (last.state() == v1::ABORTED && !last.successor().empty());
      good = good && code != 0 && !text.empty();
    }
    bool allowed = false;
    for (const grpc::StatusCode one : kAllowed) allowed = allowed || code == one;
    const std::lock_guard lock(counts_.mutex);
    ++counts_.outcomes[std::string(kNames[kind]) + " " + NameOf(code)];
    if (good && allowed) return;
    if (counts_.bad++ == 0) {
      counts_.first_bad = std::string(kNames[kind]) + " " + NameOf(code) + ": " + text;
    }
  }

  std::unique_ptr<v1::Control::Stub> stub_;
  const std::vector<std::string> models_;
  const uint64_t versions_;
  std::mt19937_64 random_;
  Counts& counts_;
};

std::string Quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + "\"";
}

int Main(int argc, char** argv) {
  const std::string runtime_dir = Flag(argc, argv, "runtime-dir", "");
  const int threads = std::stoi(Flag(argc, argv, "threads", "32"));
  const int operations = std::stoi(Flag(argc, argv, "operations", "1000"));
  const uint64_t versions = std::stoull(Flag(argc, argv, "versions", "4"));
  const uint64_t seed = std::stoull(Flag(argc, argv, "seed", "1"));
  std::vector<std::string> models;
  for (const char c : Flag(argc, argv, "models", "m0") + ",") {
    if (models.empty()) models.emplace_back();
    if (c == ',') {
      models.emplace_back();
    } else {
      models.back() += c;
    }
  }
  while (!models.empty() && models.back().empty()) models.pop_back();

  Counts counts;
  std::vector<std::thread> workers;
  const uint64_t start = NowNs();
  for (int i = 0; i < threads; ++i) {
    workers.emplace_back([&, i] {
      Operator(runtime_dir, models, versions, seed * 1000 + static_cast<uint64_t>(i), counts)
          .Run(operations);
    });
  }
  for (std::thread& worker : workers) worker.join();
  const double seconds = static_cast<double>(NowNs() - start) / 1e9;
  std::string outcomes;
  uint64_t all = 0;
  for (const auto& [name, count] : counts.outcomes) {
    outcomes += (outcomes.empty() ? "" : ", ") + Quoted(name) + ": " + std::to_string(count);
    all += count;
  }
  std::printf(
      "{\"operations\": %llu, \"threads\": %d, \"seconds\": %.1f, \"bad\": %llu, \"first_bad\": "
      "%s, "
      "\"outcomes\": {%s}}\n",
      static_cast<unsigned long long>(all), threads, seconds,
      static_cast<unsigned long long>(counts.bad), Quoted(counts.first_bad).c_str(),
      outcomes.c_str());
  return counts.bad == 0 ? 0 : 1;
}

}  // namespace
}  // namespace modelhost::bench

int main(int argc, char** argv) { return modelhost::bench::Main(argc, argv); }
