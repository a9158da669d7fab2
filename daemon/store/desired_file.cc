#include "daemon/store/desired_file.h"

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "daemon/format/text.h"
#include "daemon/platform/errno_status.h"
#include "daemon/store/atomic_file.h"
#include "daemon/store/manifest.h"

namespace modelhost {
namespace {

constexpr char kDesiredDefaultLabel[] = "stable";
constexpr size_t kMostQuoted = 80;
constexpr uint32_t kWritableByAll = 0002;
// A mounted ConfigMap removes the old directory right after the new one took its name.
constexpr int kReadAttempts = 3;

class DesiredParser {
 public:
  explicit DesiredParser(absl::string_view file) : file_(file) {}

  absl::Status Take(absl::string_view line) {
    ++line_;
    if (line_ > kMostDesiredLines) {
      return Error(absl::StrCat("more than ", kMostDesiredLines, " lines (is it the right file?)"));
    }
    line = absl::StripAsciiWhitespace(line.substr(0, line.find('#')));
    if (line.empty()) return absl::OkStatus();
    const size_t equals = line.find('=');
    if (equals == absl::string_view::npos) {
      return Error(absl::StrCat(Quoted(AsStd(line.substr(0, kMostQuoted))),
                                ": expected MODEL.LABEL = VERSION"));
    }
    return TakePair(absl::StripAsciiWhitespace(line.substr(0, equals)),
                    absl::StripAsciiWhitespace(line.substr(equals + 1)));
  }

  DesiredVersions wanted() && { return std::move(wanted_); }

 private:
  absl::Status Error(absl::string_view why) const {
    return absl::InvalidArgumentError(absl::StrCat(file_, ":", line_, ": ", why));
  }

  absl::Status TakePair(absl::string_view name, absl::string_view number) {
    const size_t dot = name.rfind('.');
    const std::string model(name.substr(0, dot));
    const std::string label(dot == absl::string_view::npos ? kDesiredDefaultLabel
                                                           : name.substr(dot + 1));
    // Labels are spelled as models are.
    if (!CheckModelName(model).ok() || !CheckModelName(label).ok()) {
      return Error(absl::StrCat(Quoted(AsStd(name.substr(0, kMostQuoted))),
                                ": not MODEL.LABEL, both [a-z0-9][a-z0-9._-]{0,63}"));
    }
    const auto version = ParseVersionNumber(number);
    if (!version.ok()) {
      return Error(absl::StrCat(model, ".", label, ": ",
                                Quoted(AsStd(number.substr(0, kMostQuoted))),
                                ": not a version (a plain number from 1)"));
    }
    const auto [it, added] = wanted_.try_emplace({model, label}, DesiredVersion{*version, line_});
    if (!added) {
      return Error(absl::StrCat(model, ".", label, ": said in line ", it->second.line, " already"));
    }
    return absl::OkStatus();
  }

  const absl::string_view file_;
  uint32_t line_ = 0;
  DesiredVersions wanted_;
};

absl::StatusOr<std::string> ReadStable(Os& os, const std::filesystem::path& real,
                                       const std::string& path) {
  auto dir = os.OpenDir(real.parent_path());
  if (!dir.ok()) return dir.status();
  auto file = os.OpenFileAt(*dir, real.filename());
  if (!file.ok()) return file.status();
  const auto before = os.Stat(*file);
  if (!before.ok()) return before.status();
  if ((before->mode & kWritableByAll) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": everybody may write it, and it decides what is served (chmod o-w)"));
  }
  auto text = ReadSmallFile(os, *file, path, kMostDesiredBytes);
  if (!text.ok()) return text.status();
  const auto after = os.Stat(*file);
  if (!after.ok()) return after.status();
  if (after->bytes != before->bytes || after->mtime_ns != before->mtime_ns ||
      text->size() != after->bytes) {
    return absl::UnavailableError(absl::StrCat(path, ": it changed while it was read"));
  }
  return text;
}

}  // namespace

absl::StatusOr<DesiredVersions> ParseDesired(absl::string_view text, absl::string_view file) {
  if (text.size() > kMostDesiredBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(file, ": longer than ", kMostDesiredBytes, " bytes (is it the right file?)"));
  }
  DesiredParser parser(file);
  while (!text.empty()) {
    const size_t end = text.find('\n');
    if (absl::Status taken = parser.Take(text.substr(0, end)); !taken.ok()) return taken;
    text.remove_prefix(end == absl::string_view::npos ? text.size() : end + 1);
  }
  return std::move(parser).wanted();
}

DesiredText ReadDesiredFile(Os& os, const std::string& path) {
  DesiredText read;
  const std::filesystem::path named(path);
  for (int attempt = 1;; ++attempt) {
    std::error_code error;
    const std::filesystem::path real = std::filesystem::canonical(named, error);
    read.watch = {named.parent_path()};
    if (error) {
      read.status = ErrnoStatus(error.value(), path);
    } else {
      if (real.parent_path() != named.parent_path()) read.watch.push_back(real.parent_path());
      auto text = ReadStable(os, real, path);
      read.status = text.status();
      if (text.ok()) read.text = *std::move(text);
    }
    if (!absl::IsNotFound(read.status) || attempt == kReadAttempts) return read;
  }
}

}  // namespace modelhost
