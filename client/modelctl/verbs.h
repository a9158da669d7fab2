// The verbs, each a function of the context and its own flags. See interfaces for what each prints.
//
// A verb returns how the program ends; what it has printed through the context goes to stdout only
// when it succeeded.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "client/modelctl/context.h"
#include "client/modelctl/exit_code.h"
#include "client/modelctl/operation_run.h"

namespace modelhost::modelctl {

inline constexpr char kVersion[] = MODELHOST_VERSION;  // From the build.

// --- verbs_read.cc
Exit Status(Context& context);
Exit ListModels(Context& context, bool watch);
Exit ListVersions(Context& context, const std::string& model, bool all);
Exit LabelList(Context& context, const std::string& model);
Exit Clients(Context& context, const std::string& model);
Exit Leases(Context& context, const std::string& model, bool stale);
Exit Health(Context& context, const std::string& model);
Exit VersionVerb(Context& context);

// --- verbs_config.cc
Exit ConfigShow(Context& context);
Exit ConfigReload(Context& context);

// --- verbs_describe.cc
Exit Describe(Context& context, const std::string& ref);

// --- verbs_inspect.cc
struct InspectFlags {
  std::string target;  // A path, or MODEL[@N].
  bool tensors = false;
  std::string filter;
};
Exit Inspect(Context& context, const InspectFlags& flags);

// --- verbs_import.cc
struct ImportFlags {
  std::string source;
  std::string out;
  std::string dtype = "keep";
  std::string quantize;
  std::string strip_prefix;
  std::vector<std::string> only;
  std::vector<std::string> exclude;
  std::vector<std::string> metadata;  // KEY=VALUE
  bool verify = true;
  bool force = false;
};
Exit Import(Context& context, const ImportFlags& flags);

// --- verbs_publish.cc
struct PublishFlags {
  std::string path;
  std::string model;
  std::string version;
  std::string label;
  std::string residency;
  std::vector<std::string> requirements;  // KEY=VALUE
  bool dry_run = false;
  bool stream = false;  // Send the bytes over gRPC even where descriptors could be passed.
};
Exit Publish(Context& context, const PublishFlags& flags);

// --- verbs_swap.cc
struct SwapFlags {
  std::string target;  // MODEL or MODEL:LABEL
  std::string version;
  std::string label;
  std::string if_current;
  std::vector<std::string> set;
  std::string strategy;
  bool allow_downtime = false;
  bool dry_run = false;
  bool no_wait = false;
};
Exit Swap(Context& context, const SwapFlags& flags);
struct RollbackFlags {
  std::string target;
  std::string label;
  std::string to;
  std::string strategy;
  bool allow_downtime = false;
  bool no_wait = false;
};
Exit Rollback(Context& context, const RollbackFlags& flags);

// --- verbs_label.cc
// `arguments`: MODEL:LABEL N, MODEL LABEL N, or MODEL@N LABEL.
Exit LabelSet(Context& context, const std::vector<std::string>& arguments,
              const std::string& if_current);
// `arguments`: MODEL:LABEL, or MODEL LABEL.
Exit LabelRemove(Context& context, const std::vector<std::string>& arguments,
                 const std::string& if_current);

// --- verbs_ops.cc
Exit Load(Context& context, const std::string& ref);
Exit Verify(Context& context, const std::string& ref);
struct UnloadFlags {
  std::string ref;
  std::string drain_timeout;
  std::string on_deadline;
};
Exit Unload(Context& context, const UnloadFlags& flags);
// One operation of the daemon followed to its end, and the line that says what came of it.
Exit RunOnVersion(Context& context, const std::string& what, const OperationStarter& start);
Exit OpsList(Context& context);
Exit OpsShow(Context& context, const std::string& id);
Exit OpsWatch(Context& context, const std::string& id);
Exit OpsCancel(Context& context, const std::string& id);
Exit Evict(Context& context, const std::string& lease);
Exit Rescan(Context& context);

// --- verbs_remove.cc
Exit Delete(Context& context, const std::string& ref, bool dry_run);
Exit CollectGarbage(Context& context, const std::string& model, bool dry_run);
// OK with --yes, or when a person at the terminal says so.
Exit Confirm(Context& context, const std::string& what, const std::string& question);

// --- verbs_events.cc
struct EventsFlags {
  std::string since;  // A duration, or a sequence.
  std::string model;
  bool follow = false;
};
Exit Events(Context& context, const EventsFlags& flags);

// --- verbs_top.cc
Exit Top(Context& context, const std::string& interval);

// --- verbs_exec.cc
struct ExecFlags {
  std::string ref;
  bool fd_paths = false;
  bool keep_names = false;
  std::vector<std::string> command;
};
// The code is the command's own.
Exit Exec(Context& context, const ExecFlags& flags);

// --- verbs_doctor.cc
Exit Doctor(Context& context);

// --- completion.cc: see completion.h

}  // namespace modelhost::modelctl
