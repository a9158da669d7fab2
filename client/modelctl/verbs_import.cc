// import: a model of any format that is read becomes a safetensors or GGUF file. Needs no daemon.
#include <cmath>
#include <csignal>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/modelctl/import.h"
#include "client/modelctl/interrupts.h"
#include "client/modelctl/render.h"
#include "client/modelctl/verbs.h"
#include "daemon/format/text.h"

namespace modelhost::modelctl {
namespace {

constexpr absl::Duration kRedraw = absl::Milliseconds(100);
// With 100,000 small tensors a look at the signals after each would take longer than they do.
constexpr absl::Duration kLook = absl::Milliseconds(10);

Outcome<ImportOptions> ParseImport(const ImportFlags& flags) {
  ImportOptions options;
  options.source = flags.source;
  options.out = flags.out;
  if (flags.dtype == "f16") options.choices.dtype = abi::DType::kF16;
  if (flags.dtype == "bf16") options.choices.dtype = abi::DType::kBF16;
  if (flags.dtype == "f32") options.choices.dtype = abi::DType::kF32;
  options.choices.quantize_q8 = flags.quantize == "q8_0";
  options.choices.strip_prefix = flags.strip_prefix;
  options.choices.only = flags.only;
  options.choices.exclude = flags.exclude;
  options.verify = flags.verify;
  options.replace = flags.force;
  for (const std::string& pair : flags.metadata) {
    const size_t equals = pair.find('=');
    if (equals == std::string::npos || equals == 0) {
      return Fail(ExitCode::kUsage,
                  absl::StrCat("--meta ", pair, ": not KEY=VALUE (general.architecture=llama)"));
    }
    if (!IsValidUtf8(pair)) return Fail(ExitCode::kUsage, "--meta: not UTF-8");
    AddedKey added = {pair.substr(0, equals), pair.substr(equals + 1)};
    if (const size_t colon = added.key.rfind(':'); colon != std::string::npos) {
      const auto type = FindGgufValueType(absl::string_view(added.key).substr(colon + 1).data());
      if (!type.has_value() || colon == 0) {
        return Fail(ExitCode::kUsage,
                    absl::StrCat("--meta ", pair,
                                 ": what follows the last colon of a key is its "
                                 "type: str, u32, i32, u64, f32 or bool (KEY:TYPE=VALUE)"));
      }
      added.type = *type;
      added.key.resize(colon);
    }
    options.metadata.push_back(std::move(added));
  }
  return options;
}

// Phases of the import as the operation that `Progress` shows; draws no more often than eyes see.
class ImportProgress {
 public:
  ImportProgress(Context& context, const std::string& source)
      : progress_(context.MakeProgress(absl::StrCat("import ", source))) {}

  void Update(absl::string_view phase, uint64_t done, uint64_t total, absl::Time now) {
    const bool same = operation_.phase() == phase;
    if (same && now - last_ < kRedraw && done < total) return;
    last_ = now;
    operation_.set_phase(std::string(phase));
    operation_.set_bytes_done(done);
    operation_.set_bytes_total(total);
    operation_.set_state(v1::RUNNING);
    progress_.Update(operation_, now);
  }
  void Finish() { progress_.Finish(absl::Now()); }

 private:
  Progress progress_;
  v1::Operation operation_;
  absl::Time last_ = absl::InfinitePast();
};

std::string ErrorText(double error) { return absl::StrFormat("%.3g", error); }

std::string VerifiedText(const ImportReport& report) {
  if (!report.verified) return "not verified";
  if (report.absolute_error == 0) return "verified (largest error 0)";
  return absl::StrCat("verified (largest error ", ErrorText(report.absolute_error), " in ",
                      Quoted(report.worst_tensor), ", relative ", ErrorText(report.relative_error),
                      ")");
}

void PrintImportJson(Context& context, const ImportOptions& options, const ImportReport& report) {
  JsonWriter json(context.json_style());
  json.BeginDocument("ImportResult");
  json.Field("source", options.source);
  json.Field("sourceFormat", report.source_format);
  json.Field("file", options.out);
  json.Field("format", report.target_format);
  json.Field("bytes", report.bytes);
  json.Field("tensorCount", uint64_t{report.tensors.size()});
  json.Field("verified", report.verified);
  // Errors that were not measured are null; JSON has no number for infinite ones.
  const auto error = [&json, &report](absl::string_view key, double value) {
    json.Key(key);
    if (!report.verified) {
      json.Null();
    } else if (std::isinf(value)) {
      json.String("inf");
    } else {
      json.Seconds(value);
    }
  };
  error("largestError", report.absolute_error);
  error("largestRelativeError", report.relative_error);
  json.Field("worstTensor", report.worst_tensor);
  json.Key("tensors");
  json.BeginArray();
  for (size_t i = 0; i < report.tensors.size(); ++i) {
    const PlannedTensor& tensor = report.tensors[i];
    json.BeginObject();
    json.Field("name", tensor.name);
    json.Field("source",
               absl::StrCat(tensor.stripped ? options.choices.strip_prefix : "", tensor.name));
    json.Field("sourceDtype", AsAbsl(abi::DTypeName(tensor.from)));
    json.Field("dtype", AsAbsl(abi::DTypeName(tensor.to)));
    json.Field("nbytes", tensor.nbytes);
    json.Field("overflowed", report.errors[i].overflowed);
    error("largestError", report.errors[i].absolute);
    error("largestRelativeError", report.errors[i].relative);
    json.EndObject();
  }
  json.EndArray();
  json.EndObject();
  context.Print(std::move(json).Take());
}

}  // namespace

Exit Import(Context& context, const ImportFlags& flags) {
  const Outcome<ImportOptions> options = ParseImport(flags);
  if (!options.ok()) return options.exit();
  // A file size limit is an error of write, not the end of the process.
  std::signal(SIGXFSZ, SIG_IGN);
  Interrupts interrupts({SIGINT, SIGTERM, SIGHUP});
  ImportProgress progress(context, options->source);
  ImportWatch watch;
  absl::Time looked = absl::InfinitePast();
  watch.progress = [&](const char* phase, uint64_t done, uint64_t total) {
    const absl::Time now = absl::Now();
    progress.Update(phase, done, total, now);
    // Before the name is given, always.
    if (done < total && now - looked < kLook) return true;
    looked = now;
    return !interrupts.Take();
  };
  watch.note = [&](const std::string& text) {
    progress.Finish();
    context.Warn(text);
  };
  const ImportEnd end = RunImport(*options, watch);
  progress.Finish();
  if (end.code != ExitCode::kOk) return Fail(end.code, end.error);
  if (context.json()) {
    PrintImportJson(context, *options, end.report);
  } else if (context.names()) {
    context.PrintLine(Printable(absl::string_view(options->out)));
  } else {
    const ImportReport& report = end.report;
    context.PrintLine(Printable(absl::string_view(
        absl::StrCat(options->out, " written  ", Plural(report.tensors.size(), "tensor"), "  ",
                     FormatBytes(report.bytes), "  ", VerifiedText(report)))));
  }
  return Exit::Ok();
}

}  // namespace modelhost::modelctl
