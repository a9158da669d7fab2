// import through the real program: what it prints, and what is left after every way of ending it.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "client/modelctl/flow_test_process.h"
#include "daemon/format/torch_builder.h"
#include "tests/fakes/temp_folder.h"

namespace modelhost::modelctl::testing {
namespace {

namespace fs = std::filesystem;

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kAddressSanitizer = true;
#elif defined(__has_feature)
constexpr bool kAddressSanitizer = __has_feature(address_sanitizer);
#else
constexpr bool kAddressSanitizer = false;
#endif

class ImportFlowTest : public ::testing::Test {
 protected:
  ImportFlowTest() { fs::create_directory(root_ / "out"); }

  // One F32 tensor "m.w" of `rows` rows of 1 MiB, without disk blocks but for the header.
  std::string Source(uint64_t rows) {
    const uint64_t bytes = rows << 20;
    std::string header = "{\"m.w\":{\"dtype\":\"F32\",\"shape\":[" + std::to_string(rows) +
                         ",262144],\"data_offsets\":[0," + std::to_string(bytes) + "]}}";
    std::string head(8, '\0');
    for (size_t i = 0; i < 8; ++i) head[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
    const fs::path path = root_ / "in.safetensors";
    std::ofstream(path, std::ios::binary) << head << header;
    fs::resize_file(path, 8 + header.size() + bytes);
    return path;
  }
  std::string Out(const std::string& name) const { return root_ / "out" / name; }
  bool OutIsEmpty() const { return fs::is_empty(root_ / "out"); }

  std::unique_ptr<Process> StartCommand(const std::vector<std::string>& command) {
    return std::make_unique<Process>(command,
                                     std::map<std::string, std::string>{{"HOME", root_.string()}});
  }
  std::unique_ptr<Process> Start(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {MODELCTL_BINARY, "import"});
    return StartCommand(arguments);
  }
  Ended Run(std::vector<std::string> arguments) { return Start(std::move(arguments))->Wait(); }
  // `before` is what a shell does first; "$@" is the import.
  Ended RunIn(const std::string& script, std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(),
                     {"sh", "-c", script, "sh", MODELCTL_BINARY, "import", "-q"});
    return StartCommand(arguments)->Wait();
  }
  static void ExpectError(const Ended& ended, int code, const std::string& part) {
    EXPECT_EQ(ended.code, code) << ended.err;
    EXPECT_EQ(ended.out, "");
    const size_t at = ended.err.find("error: ");
    ASSERT_NE(at, std::string::npos) << ended.err;
    EXPECT_EQ(ended.err.find('\n', at), ended.err.size() - 1) << ended.err;
    EXPECT_NE(ended.err.find(part, at), std::string::npos) << ended.err;
  }

  const modelhost::testing::TempFolder folder_;
  const fs::path& root_ = folder_.path();
};

TEST_F(ImportFlowTest, PrintsOneLineAndTheObject) {
  const std::string in = Source(2);
  const Ended line = Run({in, "--out", Out("a.safetensors"), "--strip-prefix", "m."});
  EXPECT_EQ(line.code, 0) << line.err;
  EXPECT_EQ(line.out,
            Out("a.safetensors") + " written  1 tensor  2.0 MiB  verified (largest error 0)\n");
  EXPECT_NE(line.err.find("import " + in + "  write"), std::string::npos) << line.err;
  EXPECT_NE(line.err.find("  verify"), std::string::npos) << line.err;
  const Ended json = Run({in, "--out", Out("b.safetensors"), "--dtype", "f16", "-o", "json", "-q"});
  EXPECT_EQ(json.err, "");
  EXPECT_EQ(json.out.find("{\n  \"apiVersion\": \"modelhost/v1\",\n  \"kind\": \"ImportResult\""),
            0u);
  EXPECT_NE(json.out.find("\"largestError\": 0.0"), std::string::npos);
  EXPECT_NE(json.out.find("\"dtype\": \"F16\""), std::string::npos);
  // What is infinite is said to be, and is not what was not measured.
  const Ended unknown = Run({in, "--out", Out("u.safetensors"), "--no-verify", "-o", "json", "-q"});
  EXPECT_NE(unknown.out.find("\"largestError\": null"), std::string::npos);
  std::fstream(in, std::ios::in | std::ios::out | std::ios::binary)
      .seekp(-4, std::ios::end)
      .write("\x00\x00\x80\x7e", 4);  // 2^126.
  const Ended infinite =
      Run({in, "--out", Out("i.safetensors"), "--dtype", "f16", "-o", "json", "-q"});
  EXPECT_NE(infinite.out.find("\"largestError\": \"inf\""), std::string::npos) << infinite.err;
  (void)Source(2);
  const Ended unverified =
      Run({in, "--out", Out("c.gguf"), "--quantize", "q8_0", "--no-verify", "-q"});
  EXPECT_NE(unverified.out.find("not verified"), std::string::npos) << unverified.err;
  EXPECT_EQ(Run({in, "--out", Out("d.safetensors"), "-q", "-o", "name"}).out,
            Out("d.safetensors") + "\n");
  const Ended progress = Run({in, "--out", Out("e.safetensors"), "--progress", "json"});
  EXPECT_NE(progress.err.find("\"phase\":\"verify\""), std::string::npos) << progress.err;
}

TEST_F(ImportFlowTest, RefusalsEndWithTheirCodes) {
  const std::string in = Source(1);
  ExpectError(Run({in}), 2, "--out");
  ExpectError(Run({in, "--out", Out("a.safetensors"), "--dtype", "int4"}), 2, "--dtype");
  ExpectError(Run({in, "--out", Out("a.safetensors"), "--meta", "novalue"}), 2, "KEY=VALUE");
  ExpectError(Run({in, "--out", Out("a.gguf"), "--meta", "k:float=1"}), 2, "KEY:TYPE=VALUE");
  ExpectError(Run({in, "--out", Out("a.gguf"), "--meta", "k:u32=x"}), 2, "not of its type");
  ExpectError(Run({in, "--out", Out("a.safetensors"), "--only", "x"}), 2, "selected by --only");
  ExpectError(Run({in, "--out", Out("a.txt")}), 2, "neither .safetensors nor .gguf");
  ExpectError(Run({in, "--out", in, "--force"}), 2, "is a file of the source");
  ExpectError(Run({(root_ / "none").string(), "--out", Out("a.safetensors")}), 3, "none");
  ExpectError(Run({in, "--out", Out("none/a.safetensors")}), 3, "none");
  std::ofstream(root_ / "bad.gguf") << "GGUF";
  ExpectError(Run({(root_ / "bad.gguf").string(), "--out", Out("a.gguf")}), 6, "bad.gguf");
  EXPECT_TRUE(OutIsEmpty());
  EXPECT_EQ(Run({in, "--out", Out("a.safetensors"), "-q"}).code, 0);
  ExpectError(Run({in, "--out", Out("a.safetensors"), "-q"}), 4, "exists already");
  EXPECT_EQ(Run({in, "--out", Out("a.safetensors"), "-q", "--force"}).code, 0);
}

TEST_F(ImportFlowTest, KilledInTheMiddleItLeavesNothing) {
  const std::string in = Source(2048);
  for (const int signal : {SIGKILL, SIGINT, SIGTERM}) {
    auto import =
        Start({in, "--out", Out("a.safetensors"), "--dtype", "f16", "--progress", "json"});
    ASSERT_TRUE(import->WaitForErr("\"phase\":\"write\""));
    import->Signal(signal);
    const Ended ended = import->Wait();
    if (signal == SIGKILL) {
      EXPECT_EQ(ended.code, 128 + SIGKILL);
    } else {
      ExpectError(ended, 130, "interrupted; nothing was written");
    }
    EXPECT_TRUE(OutIsEmpty()) << signal;
  }
}

TEST_F(ImportFlowTest, ASignalThatIsIgnoredStopsNothing) {
  const std::string in = Source(256);
  auto import = StartCommand({"sh", "-c", "trap '' HUP; exec \"$@\"", "sh", MODELCTL_BINARY,
                              "import", in, "--out", Out("a.safetensors"), "--progress", "json"});
  ASSERT_TRUE(import->WaitForErr("\"phase\":\"write\""));
  import->Signal(SIGHUP);
  EXPECT_EQ(import->Wait().code, 0);
}

// The memory is the program's own: pages of the source are the page cache's. The limit holds for
// all of it, of a tensor six times as large.
TEST_F(ImportFlowTest, MemoryDoesNotGrowWithTheTensor) {
  if (kAddressSanitizer) GTEST_SKIP() << "its shadow alone is beyond the limit";
  const std::string in = Source(384);
  for (const std::vector<std::string>& how : std::vector<std::vector<std::string>>{
           {"--out", Out("a.safetensors")}, {"--out", Out("b.gguf"), "--quantize", "q8_0"}}) {
    std::vector<std::string> arguments = {in};
    arguments.insert(arguments.end(), how.begin(), how.end());
    const Ended ended = RunIn("ulimit -d 65536 && exec \"$@\"", arguments);
    EXPECT_EQ(ended.code, 0) << ended.err;
    EXPECT_NE(ended.out.find("verified"), std::string::npos);
  }
}

TEST_F(ImportFlowTest, AHundredThousandTensorsFitTheSameMemory) {
  if (kAddressSanitizer) GTEST_SKIP() << "its shadow alone is beyond the limit";
  std::string header = "{";
  for (int i = 0; i < 100'000; ++i) {
    header += (i == 0 ? "\"layer." : ",\"layer.") + std::to_string(i) +
              ".weight\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[" +
              std::to_string(4 * i) + "," + std::to_string(4 * i + 4) + "]}";
  }
  header += "}";
  std::string head(8, '\0');
  for (size_t i = 0; i < 8; ++i) head[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
  const fs::path in = root_ / "many.safetensors";
  std::ofstream(in, std::ios::binary) << head << header;
  fs::resize_file(in, 8 + header.size() + 400'000);
  const Ended ended = RunIn("ulimit -d 65536 && exec \"$@\"",
                            {in, "--out", Out("a.safetensors"), "--dtype", "bf16"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_NE(ended.out.find("100000 tensors"), std::string::npos) << ended.out;
}

// All of it: what is mapped counts too, so that of a small machine nothing else is pushed out.
TEST_F(ImportFlowTest, ManySmallTensorsDoNotStayInMemory) {
  if (kAddressSanitizer) GTEST_SKIP() << "its shadow alone is beyond the limit";
  const std::string in = (root_ / "small.safetensors").string();
  std::string header = "{";
  const uint64_t each = 1000 << 10;
  for (uint64_t i = 0; i < 150; ++i) {
    header += (i == 0 ? "\"t" : ",\"t") + std::to_string(i) +
              "\":{\"dtype\":\"F32\",\"shape\":[256000],\"data_offsets\":[" +
              std::to_string(each * i) + "," + std::to_string(each * (i + 1)) + "]}";
  }
  header += "}";
  std::string head(8, '\0');
  for (size_t i = 0; i < 8; ++i) head[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
  std::ofstream(in, std::ios::binary) << head << header;
  fs::resize_file(in, 8 + header.size() + 150 * each);
  const Ended ended = Run({in, "--out", Out("a.safetensors"), "-q"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_LT(ended.most_kib, 96 << 10);
}

TEST_F(ImportFlowTest, AViewOfAnySizeTakesTheSameMemory) {
  if (kAddressSanitizer) GTEST_SKIP() << "its shadow alone is beyond the limit";
  namespace pickled = modelhost::testing::pickled;
  const std::string in = (root_ / "view.pt").string();
  // By another process: what a parent once held is counted as its children's.
  const pid_t writer = ::fork();
  if (writer == 0) {
    const std::string view =
        pickled::View(pickled::Storage("FloatStorage", "0", 16 << 20), 0, {4096, 4096}, {1, 4096});
    const auto model =
        modelhost::testing::Checkpoint(pickled::Whole(pickled::Dict({{pickled::Text("w"), view}})),
                                       {{"0", std::string(64 << 20, '\0')}});
    std::ofstream(in, std::ios::binary) << model.Build();
    ::_exit(0);
  }
  ASSERT_EQ(::waitpid(writer, nullptr, 0), writer);
  const Ended ended = Run({in, "--out", Out("a.safetensors"), "-q"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_LT(ended.most_kib, 128 << 10);
}

TEST_F(ImportFlowTest, AFullDiskLeavesNothing) {
  const std::string in = Source(16);
  ExpectError(RunIn("ulimit -f 4096 && exec \"$@\"", {in, "--out", Out("a.safetensors")}), 5,
              "File too large");
  EXPECT_TRUE(OutIsEmpty());
  if (StartCommand({"unshare", "--mount", "true"})->Wait().code != 0) {
    GTEST_SKIP() << "no right to mount a file system of one's own";
  }
  const std::string small = "exec unshare --mount sh -c 'mount -t tmpfs -o size=4m none " +
                            (root_ / "out").string() + " && { \"$@\"; code=$?; ls -A " +
                            (root_ / "out").string() + "; exit $code; }' sh \"$@\"";
  ExpectError(RunIn(small, {in, "--out", Out("a.safetensors")}), 5,
              "bytes, and its file system has");
}

TEST_F(ImportFlowTest, AFolderThatCannotBeWrittenIsAQuestionOfPermission) {
  const std::string in = Source(1);
  if (::geteuid() != 0) {
    fs::permissions(root_ / "out", fs::perms::owner_read | fs::perms::owner_exec);
    ExpectError(Run({in, "--out", Out("a.safetensors")}), 9, "Permission denied");
    fs::permissions(root_ / "out", fs::perms::owner_all);
    return;
  }
  if (StartCommand({"unshare", "--mount", "true"})->Wait().code != 0) {
    GTEST_SKIP() << "no right to mount a file system of one's own";
  }
  const std::string sealed = "exec unshare --mount sh -c 'mount -t tmpfs -o ro none " +
                             (root_ / "out").string() + " && exec \"$@\"' sh \"$@\"";
  ExpectError(RunIn(sealed, {in, "--out", Out("a.safetensors")}), 9, "Read-only file system");
}

TEST_F(ImportFlowTest, OfTwoAtOnceOneWins) {
  const std::string in = Source(64);
  auto first = Start({in, "--out", Out("a.safetensors"), "--progress", "json"});
  auto second = Start({in, "--out", Out("a.safetensors"), "--progress", "json"});
  ASSERT_TRUE(first->WaitForErr("\"phase\":\"write\""));
  const Ended one = first->Wait();
  const Ended two = second->Wait();
  EXPECT_EQ(one.code + two.code, 4) << one.err << two.err;
  ExpectError(one.code == 4 ? one : two, 4, "exists already");
  EXPECT_EQ(std::distance(fs::directory_iterator(root_ / "out"), fs::directory_iterator()), 1);
  // What is there is whole.
  EXPECT_EQ(Run({Out("a.safetensors"), "--out", Out("b.safetensors"), "-q"}).code, 0);
}

TEST_F(ImportFlowTest, TheSourceIsNotTouched) {
  const std::string in = Source(1);
  const auto before = fs::last_write_time(in);
  fs::permissions(in, fs::perms::owner_read);
  EXPECT_EQ(Run({in, "--out", Out("a.safetensors"), "-q", "--force"}).code, 0);
  EXPECT_EQ(fs::last_write_time(in), before);
}

}  // namespace
}  // namespace modelhost::modelctl::testing
