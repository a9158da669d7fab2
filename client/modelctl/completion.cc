#include "client/modelctl/completion.h"

#include <map>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"

namespace modelhost::modelctl {
namespace {

// What stands at a place: words that are known, or what the daemon or the disk is asked for.
struct Values {
  std::vector<std::string> words;
  std::string command;  // Prints one candidate a line.
  bool files = false;
};

constexpr char kModels[] = "modelctl ls -o name --timeout 1s 2>/dev/null";

Values ValuesOf(const std::string& place) {
  static const std::map<std::string, Values> kPlaces = {
      {"MODEL", {{}, kModels, false}},
      {"REF", {{}, kModels, false}},
      {"TARGET", {{}, kModels, true}},
      {"PATH", {{}, "", true}},
      {"DIR", {{}, "", true}},
      {"SRC", {{}, "", true}},
      {"FILE", {{}, "", true}},
      {"--dtype", {{"f16", "bf16", "f32", "keep"}, "", false}},
      {"--quantize", {{"q8_0"}, "", false}},
      {"OPERATION", {{}, "modelctl ops ls -o name --timeout 1s 2>/dev/null", false}},
      {"LEASE", {{}, "modelctl leases -o name --timeout 1s 2>/dev/null", false}},
      {"SHELL", {{"bash", "zsh", "fish"}, "", false}},
      {"--output", {{"table", "wide", "json", "jsonl", "name"}, "", false}},
      {"--progress", {{"auto", "bar", "plain", "json", "none"}, "", false}},
      {"--residency", {{"mapped", "warm", "pinned", "sealed"}, "", false}},
      {"--require", {{"tensorrt=", "compute_capability=", "platform=", "cuda_driver="}, "", false}},
      {"--strategy", {{"availability", "resource", "auto"}, "", false}},
      {"--on-deadline", {{"wait", "release"}, "", false}},
  };
  const auto found = kPlaces.find(place);
  return found == kPlaces.end() ? Values{} : found->second;
}

struct Flag {
  std::vector<std::string> names;  // "-o", "--output"
  std::string help;
  bool takes_value = false;
  Values values;
};

struct Verb {
  std::string path;  // "swap", "label set"
  std::string help;
  std::vector<std::string> children;
  std::vector<Flag> flags;
  Values positional;
};

std::vector<Flag> FlagsOf(const CLI::App& app) {
  std::vector<Flag> flags;
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_positional() || option->get_group().empty()) continue;
    Flag flag;
    for (const std::string& name : option->get_snames()) flag.names.push_back("-" + name);
    for (const std::string& name : option->get_lnames()) flag.names.push_back("--" + name);
    flag.help = option->get_description();
    flag.takes_value = option->get_expected_max() > 0 && option->get_type_size_max() > 0;
    if (flag.takes_value) {
      flag.values = ValuesOf(flag.names.back());
      if (flag.values.words.empty()) flag.values = ValuesOf(option->get_type_name());
    }
    flags.push_back(std::move(flag));
  }
  return flags;
}

void Collect(const CLI::App& app, const std::string& prefix, std::vector<Verb>& verbs) {
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) {
    Verb verb;
    verb.path = absl::StrCat(prefix, sub->get_name());
    verb.help = sub->get_description();
    verb.flags = FlagsOf(*sub);
    for (const CLI::App* child : sub->get_subcommands([](const CLI::App*) { return true; })) {
      verb.children.push_back(child->get_name());
    }
    for (const CLI::Option* option : sub->get_options()) {
      if (option->get_positional()) verb.positional = ValuesOf(option->get_name());
    }
    const std::string path = verb.path;
    verbs.push_back(std::move(verb));
    Collect(*sub, path + " ", verbs);
  }
}

std::string Quoted(absl::string_view text) {
  return absl::StrCat("'", absl::StrReplaceAll(text, {{"'", "'\\''"}}), "'");
}

std::string NamesOf(const std::vector<Flag>& flags) {
  return absl::StrJoin(flags, " ", [](std::string* out, const Flag& flag) {
    absl::StrAppend(out, absl::StrJoin(flag.names, " "));
  });
}

// `case` arms of the flags that take a value, each running `body(values)`.
template <typename Body>
std::string ValueArms(const std::vector<Flag>& globals, const std::vector<Verb>& verbs, Body body) {
  // A flag means the same in every verb, so that one arm each is enough.
  std::map<std::string, std::string> arms;
  const auto add = [&](const std::vector<Flag>& flags) {
    for (const Flag& flag : flags) {
      if (flag.takes_value) arms.emplace(absl::StrJoin(flag.names, "|"), body(flag.values));
    }
  };
  add(globals);
  for (const Verb& verb : verbs) add(verb.flags);
  std::string out;
  for (const auto& [pattern, action] : arms) {
    absl::StrAppend(&out, "    ", pattern, ") ", action, " ;;\n");
  }
  return out;
}

// Flags with a value, as one pattern of a case.
std::string ValueFlags(const std::vector<Flag>& globals, const std::vector<Verb>& verbs) {
  std::map<std::string, bool> names;
  const auto add = [&](const std::vector<Flag>& flags) {
    for (const Flag& flag : flags) {
      for (const std::string& name : flag.names) {
        if (flag.takes_value) names[name] = true;
      }
    }
  };
  add(globals);
  for (const Verb& verb : verbs) add(verb.flags);
  return absl::StrJoin(names, "|", [](std::string* out, const auto& name) { *out += name.first; });
}

std::string TopVerbs(const std::vector<Verb>& verbs) {
  std::vector<std::string> names;
  for (const Verb& verb : verbs) {
    if (!absl::StrContains(verb.path, ' ')) names.push_back(verb.path);
  }
  return absl::StrJoin(names, " ");
}

// The common part of bash and zsh: which verb the line has, and what may come next, in `candidates`
// (words) and `files` (1: also files).
std::string Words(const std::vector<Flag>& globals, const std::vector<Verb>& verbs) {
  const auto words_of = [](const Values& values) {
    std::string out = absl::StrCat("candidates=\"", absl::StrJoin(values.words, " "));
    if (!values.command.empty()) absl::StrAppend(&out, "$(", values.command, ")");
    absl::StrAppend(&out, "\"; files=", values.files ? 1 : 0);
    return out;
  };
  std::string out = absl::StrCat(
      "  case \"$previous\" in\n",
      ValueArms(globals, verbs, [&](const Values& v) { return words_of(v) + "; return"; }),
      "  esac\n  case \"$verb\" in\n");
  for (const Verb& verb : verbs) {
    std::string flags = NamesOf(verb.flags);
    absl::StrAppend(&out, "    ", Quoted(verb.path), ")\n      flags=\"", flags, "\"\n      ");
    if (!verb.children.empty()) {
      absl::StrAppend(&out, "candidates=\"", absl::StrJoin(verb.children, " "), "\"");
    } else {
      // The daemon is not asked when a flag is being typed.
      absl::StrAppend(&out, "[ \"${current#-}\" = \"$current\" ] && { ", words_of(verb.positional),
                      "; }");
    }
    absl::StrAppend(&out, " ;;\n");
  }
  absl::StrAppend(&out, "    *)\n      candidates=\"", TopVerbs(verbs), "\" ;;\n  esac\n",
                  "  case \"$current\" in\n    -*) candidates=\"$flags ", NamesOf(globals),
                  "\"; files=0 ;;\n  esac\n");
  return out;
}

// Sets $verb from the words before the one being completed, which the caller gives as arguments.
std::string FindVerb(const std::vector<Flag>& globals, const std::vector<Verb>& verbs) {
  std::vector<std::string> parents;
  for (const Verb& verb : verbs) {
    if (!verb.children.empty()) parents.push_back(verb.path);
  }
  return absl::StrCat(
      "_modelctl_verb() {\n  verb=''\n  while [ $# -gt 0 ]; do\n    case \"$1\" in\n      ",
      ValueFlags(globals, verbs), ") shift ;;\n      -*) ;;\n",
      "      *)\n        case \"$verb\" in\n          '') verb=\"$1\" ;;\n          ",
      absl::StrJoin(parents, "|"), ") verb=\"$verb $1\" ;;\n        esac ;;\n    esac\n",
      "    [ $# -gt 0 ] && shift\n  done\n}\n");
}

std::string Bash(const std::vector<Flag>& globals, const std::vector<Verb>& verbs) {
  return absl::StrCat(
      "# bash completion of modelctl: source it, or install it as\n"
      "# /usr/share/bash-completion/completions/modelctl\n",
      FindVerb(globals, verbs), "_modelctl_words() {\n  local flags=''\n  candidates=''; files=0\n",
      Words(globals, verbs),
      "}\n"
      "_modelctl() {\n"
      "  local verb candidates files\n"
      "  local current=\"${COMP_WORDS[COMP_CWORD]}\" previous=\"${COMP_WORDS[COMP_CWORD-1]}\"\n"
      "  _modelctl_verb \"${COMP_WORDS[@]:1:COMP_CWORD-1}\"\n"
      "  _modelctl_words\n"
      "  COMPREPLY=($(compgen -W \"$candidates\" -- \"$current\"))\n"
      "  if [ \"$files\" = 1 ]; then\n"
      "    COMPREPLY+=($(compgen -f -- \"$current\"))\n"
      "    compopt -o filenames 2>/dev/null\n"
      "  fi\n"
      "}\n"
      "complete -F _modelctl modelctl\n");
}

std::string Zsh(const std::vector<Flag>& globals, const std::vector<Verb>& verbs) {
  return absl::StrCat(
      "#compdef modelctl\n"
      "# zsh completion of modelctl: put it into a folder of $fpath as _modelctl\n",
      FindVerb(globals, verbs), "_modelctl_words() {\n  local flags=''\n  candidates=''; files=0\n",
      Words(globals, verbs),
      "}\n"
      "_modelctl() {\n"
      "  local verb candidates files\n"
      "  local current=\"${words[CURRENT]}\" previous=\"${words[CURRENT-1]}\"\n"
      "  _modelctl_verb \"${(@)words[2,CURRENT-1]}\"\n"
      "  _modelctl_words\n"
      "  [ -n \"$candidates\" ] && compadd -- ${=candidates}\n"
      "  [ \"$files\" = 1 ] && _files\n"
      "  return 0\n"
      "}\n"
      "if [ \"$funcstack[1]\" = _modelctl ]; then\n  _modelctl \"$@\"\nelse\n"
      "  compdef _modelctl modelctl\nfi\n");
}

std::string FishFlags(const std::vector<Flag>& flags, const std::string& condition) {
  std::string out;
  for (const Flag& flag : flags) {
    absl::StrAppend(&out, "complete -c modelctl", condition);
    for (const std::string& name : flag.names) {
      absl::StrAppend(&out, name.size() == 2 ? " -s " : " -l ",
                      name.substr(name.size() == 2 ? 1 : 2));
    }
    if (flag.takes_value) {
      absl::StrAppend(&out, flag.values.files ? " -rF" : " -x");
      if (!flag.values.words.empty()) {
        absl::StrAppend(&out, " -a ", Quoted(absl::StrJoin(flag.values.words, " ")));
      }
      if (!flag.values.command.empty()) {
        absl::StrAppend(&out, " -a ", Quoted(absl::StrCat("(", flag.values.command, ")")));
      }
    }
    absl::StrAppend(&out, " -d ", Quoted(flag.help), "\n");
  }
  return out;
}

std::string Fish(const std::vector<Flag>& globals, const std::vector<Verb>& verbs) {
  std::string out = absl::StrCat(
      "# fish completion of modelctl: ~/.config/fish/completions/modelctl.fish\n"
      "complete -c modelctl -f\n",
      FishFlags(globals, ""));
  for (const Verb& verb : verbs) {
    const size_t space = verb.path.find(' ');
    const std::string name = verb.path.substr(space == std::string::npos ? 0 : space + 1);
    std::string here = absl::StrCat(" -n ", Quoted("__fish_use_subcommand"));
    std::string inside = absl::StrCat("__fish_seen_subcommand_from ", name);
    if (space != std::string::npos) {
      const std::string parent = verb.path.substr(0, space);
      std::vector<std::string> siblings;
      for (const Verb& each : verbs) {
        if (each.path == parent) siblings = each.children;
      }
      here = absl::StrCat(" -n ", Quoted(absl::StrCat("__fish_seen_subcommand_from ", parent,
                                                      "; and not __fish_seen_subcommand_from ",
                                                      absl::StrJoin(siblings, " "))));
      inside = absl::StrCat("__fish_seen_subcommand_from ", parent, "; and ", inside);
    }
    absl::StrAppend(&out, "complete -c modelctl", here, " -a ", name, " -d ", Quoted(verb.help),
                    "\n");
    const std::string condition = absl::StrCat(" -n ", Quoted(inside));
    absl::StrAppend(&out, FishFlags(verb.flags, condition));
    if (verb.positional.files) absl::StrAppend(&out, "complete -c modelctl", condition, " -F\n");
    if (!verb.positional.words.empty()) {
      absl::StrAppend(&out, "complete -c modelctl", condition, " -a ",
                      Quoted(absl::StrJoin(verb.positional.words, " ")), "\n");
    }
    if (!verb.positional.command.empty()) {
      absl::StrAppend(&out, "complete -c modelctl", condition, " -a ",
                      Quoted(absl::StrCat("(", verb.positional.command, ")")), "\n");
    }
  }
  return out;
}

}  // namespace

std::string CompletionScript(absl::string_view shell, const CLI::App& app) {
  const std::vector<Flag> globals = FlagsOf(app);
  std::vector<Verb> verbs;
  Collect(app, "", verbs);
  if (shell == "bash") return Bash(globals, verbs);
  if (shell == "zsh") return Zsh(globals, verbs);
  if (shell == "fish") return Fish(globals, verbs);
  return "";
}

}  // namespace modelhost::modelctl
