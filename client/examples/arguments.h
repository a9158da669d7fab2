// Flags of the examples: `--name value` and `--switch`, no more than that.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

class Arguments {
 public:
  Arguments(int argc, char** argv) : words_(argv + 1, argv + argc), used_(words_.size()) {}

  bool Switch(const std::string& name) {
    for (size_t i = 0; i < words_.size(); ++i) {
      if (words_[i] == name && !used_[i]) return used_[i] = true;
    }
    return false;
  }
  // All values of a flag that may be repeated.
  std::vector<std::string> Values(const std::string& name) {
    std::vector<std::string> values;
    for (size_t i = 0; i + 1 < words_.size(); ++i) {
      if (words_[i] != name || used_[i]) continue;
      used_[i] = used_[i + 1] = true;
      values.push_back(words_[i + 1]);
    }
    return values;
  }
  std::string Value(const std::string& name, const std::string& otherwise) {
    const std::vector<std::string> values = Values(name);
    return values.empty() ? otherwise : values.back();
  }
  // Ends the program with 2 when the value is no number.
  long Number(const std::string& name, long otherwise) {
    const std::string text = Value(name, "");
    if (text.empty()) return otherwise;
    char* end = nullptr;
    const long number = std::strtol(text.c_str(), &end, 10);
    if (*end != '\0') Usage(name + " " + text + ": not a number");
    return number;
  }
  // Ends the program with 2 when a word was not understood.
  void Done(const char* usage) {
    for (size_t i = 0; i < words_.size(); ++i) {
      if (!used_[i]) Usage(words_[i] + ": unknown argument\nusage: " + usage);
    }
  }

 private:
  [[noreturn]] static void Usage(const std::string& text) {
    std::fprintf(stderr, "error: %s\n", text.c_str());
    std::exit(2);
  }
  std::vector<std::string> words_;
  std::vector<bool> used_;
};
