#include "client/modelctl/commands.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/modelctl/completion.h"
#include "client/modelctl/verbs.h"

namespace modelhost::modelctl {
namespace {

// Everything that a line can set; lives as long as the command.
struct Line {
  Globals globals;
  std::string timeout;
  bool watch = false, all = false, stale = false, dry_run = false;
  std::string model, ref, id, lease, shell, if_current, interval;
  std::vector<std::string> label_arguments;
  InspectFlags inspect;
  ImportFlags import;
  PublishFlags publish;
  SwapFlags swap;
  RollbackFlags rollback;
  UnloadFlags unload;
  ExecFlags exec;
  EventsFlags events;
  std::function<Exit(Context&)> run;
};

const std::map<std::string, OutputFormat> kOutputs = {{"table", OutputFormat::kTable},
                                                      {"wide", OutputFormat::kWide},
                                                      {"json", OutputFormat::kJson},
                                                      {"jsonl", OutputFormat::kJsonl},
                                                      {"name", OutputFormat::kName}};
const std::map<std::string, ProgressMode> kProgress = {{"auto", ProgressMode::kAuto},
                                                       {"bar", ProgressMode::kBar},
                                                       {"plain", ProgressMode::kPlain},
                                                       {"json", ProgressMode::kJson},
                                                       {"none", ProgressMode::kNone}};

template <typename Enum>
CLI::Validator OneOf(const std::map<std::string, Enum>& words, const char* shown) {
  std::vector<std::string> names;
  for (const auto& [name, value] : words) names.push_back(name);
  return CLI::IsMember(names).description(shown);
}

void AddStrategy(CLI::App* verb, std::string& strategy, bool& allow_downtime) {
  verb->add_option("--strategy", strategy,
                   "availability: old and new side by side; resource: the old one leaves first, "
                   "and nothing serves in between; auto: the first where it fits, else the second "
                   "if --allow-downtime")
      ->type_name("HOW")
      ->check(CLI::IsMember({"availability", "resource", "auto"}));
  verb->add_flag("--allow-downtime", allow_downtime,
                 "Agree to a gap in serving (strategy resource, or auto)");
}

// Gone before the line is parsed: what it makes refers to `app` and `line` alone.
class Builder {
 public:
  Builder(CLI::App& app, Line& line) : app_(app), line_(line) {}

  void Build() {
    Globals();
    Looking();
    Converting();
    Changing();
    Operations();
    Machine();
  }

 private:
  using Run = std::function<Exit(Context&)>;

  CLI::App* Verb(CLI::App* parent, const char* group, const char* name, const char* help, Run run) {
    CLI::App* verb = parent->add_subcommand(name, help);
    verb->fallthrough();
    if (*group != '\0') verb->group(group);  // An empty group would hide it.
    verb->callback([line = &line_, run = std::move(run)] { line->run = run; });
    return verb;
  }
  CLI::App* Group(const char* group, const char* name, const char* help) {
    CLI::App* verb = app_.add_subcommand(name, help);
    verb->fallthrough();
    verb->group(group);
    verb->require_subcommand(1);
    return verb;
  }

  void Globals() {
    modelctl::Globals& g = line_.globals;
    app_.add_option("--runtime-dir", g.runtime_dir, "Folder of the daemon's sockets")
        ->type_name("DIR");
    app_.add_option("--target", g.target, "Another control socket: unix:PATH")->type_name("URI");
    app_.add_option_function<std::string>(
            "-o,--output", [&g](const std::string& name) { g.output = kOutputs.at(name); },
            "How to print what goes to stdout")
        ->type_name("FORMAT")
        ->check(OneOf(kOutputs, "table|wide|json|jsonl|name"));
    app_.add_option_function<std::string>(
            "--progress", [&g](const std::string& name) { g.progress = kProgress.at(name); },
            "How to show on stderr what goes on")
        ->type_name("MODE")
        ->check(OneOf(kProgress, "auto|bar|plain|json|none"));
    app_.add_option("--timeout", line_.timeout,
                    "How long to wait; an operation goes on beyond it (500ms, 90s, 10m)")
        ->type_name("DUR");
    app_.add_flag("-q,--quiet", g.quiet, "No progress, no remarks");
    app_.add_flag("-v,--verbose", g.verbose, "Say more on stderr");
    app_.add_flag("--no-color", g.no_color, "No colours (as NO_COLOR)");
    app_.add_flag("-y,--yes", g.yes, "Do not ask");
    app_.set_version_flag("--version", absl::StrCat("modelctl ", kVersion));
  }

  void Looking() {
    const char* const group = "Look";
    Line& l = line_;
    Verb(&app_, group, "status", "The daemon: version, readiness, budgets, device", Status);
    CLI::App* ls = Verb(&app_, group, "ls", "The models and what of them is resident",
                        [&l](Context& c) { return ListModels(c, l.watch); });
    ls->add_flag("--watch", l.watch, "Go on and print what changes");
    CLI::App* versions =
        Verb(&app_, group, "versions", "The versions of a model, unusable ones too",
             [&l](Context& c) { return ListVersions(c, l.model, l.all); });
    versions->add_option("MODEL", l.model)->required();
    versions->add_flag("--all", l.all, "Also older versions that are only on disk");
    Verb(&app_, group, "describe", "One version: files, residency, its last load phase by phase",
         [&l](Context& c) { return Describe(c, l.ref); })
        ->add_option("REF", l.ref, "MODEL, MODEL@N or MODEL:LABEL")
        ->required();
    CLI::App* inspect = Verb(&app_, group, "inspect", "The tensors of a file, folder or version",
                             [&l](Context& c) { return Inspect(c, l.inspect); });
    inspect->add_option("TARGET", l.inspect.target, "A file, a folder, MODEL or MODEL@N")
        ->required();
    inspect->add_flag("--tensors", l.inspect.tensors, "List them all");
    inspect->add_option("--filter", l.inspect.filter, "Only tensors whose names match")
        ->type_name("GLOB");
    CLI::App* clients = Verb(&app_, group, "clients", "Processes that are connected",
                             [&l](Context& c) { return Clients(c, l.model); });
    clients->add_option("--model", l.model, "Only those that hold a lease on it")
        ->type_name("MODEL");
    CLI::App* leases = Verb(&app_, group, "leases", "Leases and who holds them",
                            [&l](Context& c) { return Leases(c, l.model, l.stale); });
    leases->add_option("--model", l.model, "Only those on it")->type_name("MODEL");
    leases->add_flag("--stale", l.stale,
                     "Only those whose label has moved on, or whose version no label names");
    Verb(&app_, group, "top", "What is resident and under way, drawn again and again",
         [&l](Context& c) { return Top(c, l.interval); })
        ->add_option("--interval", l.interval, "How often (1s)")
        ->type_name("DUR");
    CLI::App* events = Verb(&app_, group, "events", "What happened, oldest first",
                            [&l](Context& c) { return Events(c, l.events); });
    events
        ->add_option("--since", l.events.since,
                     "Only what is not older (10m), or comes after that event (a number)")
        ->type_name("DUR|SEQ");
    events->add_flag("--follow", l.events.follow, "Go on and print what happens");
    events->add_option("--model", l.events.model, "Only what is about it")->type_name("MODEL");
  }

  void Converting() {
    ImportFlags& f = line_.import;
    CLI::App* import = Verb(&app_, "Convert", "import",
                            "Write a model of any format as one safetensors or GGUF file",
                            [&f](Context& c) { return Import(c, f); });
    import->add_option("SRC", f.source, "A file, a folder or a snapshot of a download cache")
        ->required();
    import->add_option("--out", f.out, "FILE.safetensors or FILE.gguf, not in SRC")
        ->type_name("FILE")
        ->required();
    import->add_option("--dtype", f.dtype, "What floats become; others stay (keep)")
        ->type_name("f16|bf16|f32|keep")
        ->check(CLI::IsMember({"f16", "bf16", "f32", "keep"}).description(""));
    import->add_option("--quantize", f.quantize, "2-D weights become blocks; GGUF only")
        ->type_name("q8_0")
        ->check(CLI::IsMember({"q8_0"}).description(""));
    const auto repeatable = [import](const char* flag, std::vector<std::string>& into,
                                     const char* help, const char* type) {
      import->add_option(flag, into, help)->type_name(type)->allow_extra_args(false);
    };
    repeatable("--only", f.only, "Only tensors whose names match; repeatable", "GLOB");
    repeatable("--exclude", f.exclude, "But not those whose names match; repeatable", "GLOB");
    import->add_option("--strip-prefix", f.strip_prefix, "Taken off the names that begin with it")
        ->type_name("PREFIX");
    repeatable(
        "--meta", f.metadata,
        "More metadata (general.architecture=llama, k:f32=1: KEY:TYPE=VALUE of str u32 i32 u64 f32 "
        "bool); repeatable",
        "KEY=VALUE");
    import->add_flag("--verify,!--no-verify", f.verify,
                     "Read the result back and compare it with the source (on)");
    import->add_flag("--force", f.force, "Replace FILE if it exists");
    import->footer(
        "SRC is never changed. FILE appears complete, compared and on the disk, or not at all.\n"
        "Patterns are matched with the names that `modelctl inspect SRC -o name` prints.");
  }

  void Changing() {
    const char* const group = "Change";
    Line& l = line_;
    CLI::App* publish = Verb(&app_, group, "publish", "Make a folder or a file a new version",
                             [&l](Context& c) { return Publish(c, l.publish); });
    publish->add_option("PATH", l.publish.path, "What to publish")->required();
    publish->add_option("--model", l.publish.model, "Of which model")
        ->type_name("MODEL")
        ->required();
    publish->add_option("--version", l.publish.version, "Its number, new")->type_name("N");
    publish->add_option("--label", l.publish.label, "Then swap this label to it")
        ->type_name("LABEL");
    publish->add_option("--residency", l.publish.residency, "How the model's bytes are held")
        ->type_name("HOW")
        ->check(CLI::IsMember({"mapped", "warm", "pinned", "sealed"}));
    publish
        ->add_option("--require", l.publish.requirements,
                     "What the machine must have: tensorrt=10.3.0, compute_capability=8.7, "
                     "platform=linux-aarch64, cuda_driver=12.4; repeatable")
        ->type_name("KEY=VALUE")
        ->allow_extra_args(false);
    publish->add_flag("--dry-run", l.publish.dry_run, "Check everything, send nothing");
    publish->add_flag("--stream", l.publish.stream, "Send bytes, not descriptors")->group("");

    const auto version_verb = [&](const char* name, const char* help, Run run) {
      Verb(&app_, group, name, help, std::move(run))
          ->add_option("REF", l.ref, "MODEL@N")
          ->required();
    };
    version_verb("verify", "Read a version again and compare its digests",
                 [&l](Context& c) { return Verify(c, l.ref); });
    version_verb("load", "Make a version resident", [&l](Context& c) { return Load(c, l.ref); });
    CLI::App* unload = Verb(&app_, group, "unload", "Free a version when its last lease has ended",
                            [&l](Context& c) { return Unload(c, l.unload); });
    unload->add_option("REF", l.unload.ref, "MODEL@N")->required();
    unload->add_option("--drain-timeout", l.unload.drain_timeout, "How long leases may take to end")
        ->type_name("DUR");
    unload
        ->add_option("--on-deadline", l.unload.on_deadline, "What then: go on waiting, or release")
        ->type_name("HOW")
        ->check(CLI::IsMember({"wait", "release"}));

    CLI::App* swap = Verb(&app_, group, "swap", "Load a version and move a label to it",
                          [&l](Context& c) { return Swap(c, l.swap); });
    swap->add_option("MODEL", l.swap.target, "MODEL or MODEL:LABEL")->required();
    swap->add_option("--version", l.swap.version, "Where to")->type_name("N");
    swap->add_option("--label", l.swap.label, "Which label (stable)")->type_name("LABEL");
    swap->add_option("--if-current", l.swap.if_current,
                     "Only if it names N now (none: only if unset)")
        ->type_name("N");
    swap->add_option("--set", l.swap.set, "Another model to move at the same moment; repeatable")
        ->type_name("MODEL=N")
        ->allow_extra_args(false);
    AddStrategy(swap, l.swap.strategy, l.swap.allow_downtime);
    swap->add_flag("--dry-run", l.swap.dry_run, "Print the capacity plan and change nothing");
    swap->add_flag("--no-wait", l.swap.no_wait, "Print the operation and return");
    CLI::App* rollback = Verb(&app_, group, "rollback", "Move a label back to its previous version",
                              [&l](Context& c) { return Rollback(c, l.rollback); });
    rollback->add_option("MODEL", l.rollback.target, "MODEL or MODEL:LABEL")->required();
    rollback->add_option("--label", l.rollback.label, "Which label (stable)")->type_name("LABEL");
    rollback->add_option("--to", l.rollback.to, "Another version than the previous one")
        ->type_name("N");
    AddStrategy(rollback, l.rollback.strategy, l.rollback.allow_downtime);
    rollback->add_flag("--no-wait", l.rollback.no_wait, "Print the operation and return");

    CLI::App* label = Group(group, "label", "Labels: list, set, remove");
    Verb(label, "", "ls", "All labels, or those of a model", [&l](Context& c) {
      return LabelList(c, l.model);
    })->add_option("MODEL", l.model);
    CLI::App* set = Verb(label, "", "set", "Point a label at a version that is READY",
                         [&l](Context& c) { return LabelSet(c, l.label_arguments, l.if_current); });
    set->add_option("MODEL", l.label_arguments, "MODEL:LABEL N")->required()->expected(1, 3);
    set->add_option("--if-current", l.if_current, "Only if it names N now")->type_name("N");
    CLI::App* rm = Verb(label, "", "rm", "Remove a label", [&l](Context& c) {
      return LabelRemove(c, l.label_arguments, l.if_current);
    });
    rm->add_option("MODEL", l.label_arguments, "MODEL:LABEL")->required()->expected(1, 2);
    rm->add_option("--if-current", l.if_current, "Only if it names N now")->type_name("N");
    Verb(&app_, group, "evict", "End a lease in the daemon's books, never a client's mappings",
         [&l](Context& c) { return Evict(c, l.lease); })
        ->add_option("LEASE", l.lease)
        ->required();
    Verb(&app_, group, "rescan", "Look at the store again", Rescan);
    CLI::App* remove = Verb(&app_, group, "delete", "Remove a version that nobody needs",
                            [&l](Context& c) { return Delete(c, l.ref, l.dry_run); });
    remove->add_option("REF", l.ref, "MODEL@N")->required();
    remove->add_flag("--dry-run", l.dry_run, "Say what would go, and change nothing");
    CLI::App* gc =
        Verb(&app_, group, "gc",
             "Remove versions beyond keep_on_disk, and what crashes and removed versions have left",
             [&l](Context& c) { return CollectGarbage(c, l.model, l.dry_run); });
    gc->add_option("MODEL", l.model, "Only versions of this one");
    gc->add_flag("--dry-run", l.dry_run, "Say what would go, and change nothing");
  }

  void Operations() {
    Line& l = line_;
    CLI::App* ops = Group("Operations", "ops", "Operations: list, show, follow, cancel");
    Verb(ops, "", "ls", "Running ones and those of the last day", OpsList);
    const auto one = [&](const char* name, const char* help, Run run) {
      Verb(ops, "", name, help, std::move(run))->add_option("OPERATION", l.id, "op-N")->required();
    };
    one("show", "One operation", [&l](Context& c) { return OpsShow(c, l.id); });
    one("watch", "Follow one to its end", [&l](Context& c) { return OpsWatch(c, l.id); });
    one("cancel", "Stop one", [&l](Context& c) { return OpsCancel(c, l.id); });
    CLI::App* exec =
        Verb(&app_, "Operations", "exec", "Run a program on the files of a version, under a lease",
             [&l](Context& c) { return Exec(c, l.exec); });
    exec->add_option("REF", l.exec.ref, "MODEL, MODEL@N or MODEL:LABEL")->required();
    CLI::Option* fd_paths =
        exec->add_flag("--fd-paths", l.exec.fd_paths, "{file} becomes /proc/self/fd/N");
    exec->add_flag("--keep-names", l.exec.keep_names,
                   "For programs that resolve links: realpath() keeps the names of {}")
        ->excludes(fd_paths);
    exec->footer(
        "modelctl exec MODEL -- CMD ARGS. In ARGS, {} is a folder with every file of the version,\n"
        "{model.gguf} one of them.");
  }

  void Machine() {
    const char* const group = "Machine";
    Line& l = line_;
    Verb(&app_, group, "health",
         "Exit code for probes: 0 ok, 12 degraded, 1 not ready, 8 no daemon",
         [&l](Context& c) { return Health(c, l.model); })
        ->add_option("MODEL", l.model);
    CLI::App* config = Group(group, "config", "The daemon's configuration: show, reload");
    Verb(config, "", "show", "Every value and where it comes from", ConfigShow);
    Verb(config, "", "reload", "Read the file again (as SIGHUP) and say what came of it",
         ConfigReload);
    Verb(&app_, group, "doctor", "Is this machine fit, and what to do", Doctor);
    CLI::App* completion = Verb(&app_, group, "completion", "A completion script for a shell",
                                [app = &app_, &l](Context& c) {
                                  c.Print(CompletionScript(l.shell, *app));
                                  return Exit::Ok();
                                });
    completion->add_option("SHELL", l.shell)
        ->required()
        ->check(CLI::IsMember({"bash", "zsh", "fish"}));
    Verb(&app_, group, "version", "The versions of modelctl and of the daemon", VersionVerb);
  }

  CLI::App& app_;
  Line& line_;
};

// The verb that a line had got to, for the advice.
std::string Path(const CLI::App& app) {
  std::string path = "modelctl";
  const CLI::App* at = &app;
  while (!at->get_subcommands().empty()) {
    at = at->get_subcommands().front();
    absl::StrAppend(&path, " ", at->get_name());
  }
  return path;
}

Exit Usage(const CLI::App& app, absl::string_view why) {
  const std::string path = Path(app);
  return Fail(ExitCode::kUsage, absl::StrCat(path, ": ", why, " (see `", path, " --help`)"));
}

}  // namespace

Outcome<Command> ParseCommandLine(const std::vector<std::string>& arguments) {
  auto app =
      std::make_shared<CLI::App>("Controls the modelhost daemon of this machine.", "modelctl");
  auto line = std::make_shared<Line>();
  app->require_subcommand(0, 1);
  app->set_help_flag("-h,--help", "Print this and exit");
  Builder(*app, *line).Build();

  // What follows -- of exec is another program's and not ours to read.
  std::vector<std::string> ours = arguments;
  const auto mark = std::find(ours.begin(), ours.end(), "--");
  if (mark != ours.end() && std::find(ours.begin(), mark, "exec") != mark) {
    line->exec.command.assign(mark + 1, ours.end());
    ours.erase(mark, ours.end());
  }
  std::reverse(ours.begin(), ours.end());  // As the parser wants them.
  Command command;
  try {
    app->parse(ours);
  } catch (const CLI::CallForHelp&) {
    command.text = app->help();
    return command;
  } catch (const CLI::CallForAllHelp&) {
    command.text = app->help("", CLI::AppFormatMode::All);
    return command;
  } catch (const CLI::CallForVersion&) {
    // Global options may follow a verb, but `rollback M --version 1` must not pass for done.
    if (!app->get_subcommands().empty() || app->remaining_size() > 0) {
      return Usage(*app, "--version: not an option of this verb, and alone without one");
    }
    command.text = absl::StrCat("modelctl ", kVersion, "\n");
    return command;
  } catch (const CLI::ExtrasError& error) {
    std::string why = error.what();
    if (app->got_subcommand("swap") && line->swap.version.empty()) {
      absl::StrAppend(&why, "; a version goes after --version");
    }
    return Usage(*app, why);
  } catch (const CLI::ParseError& error) {
    return Usage(*app, error.what());
  }
  if (!line->run) return Usage(*app, "no verb given");
  if (!line->timeout.empty()) {
    const Outcome<absl::Duration> timeout = ParseDurationFlag("--timeout", line->timeout);
    if (!timeout.ok()) return timeout.exit();
    line->globals.timeout = *timeout;
  }
  command.globals = line->globals;
  command.silent = line->globals.quiet && app->got_subcommand("health");
  // The verb's function refers to both.
  command.run = [app, line](Context& context) { return line->run(context); };
  return command;
}

}  // namespace modelhost::modelctl
