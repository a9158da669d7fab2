#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "daemon/observe/log_line.h"
#include "daemon/observe/log_observer.h"
#include "daemon/observe/logger.h"
#include "tests/fakes/manual_clock.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::SizeIs;

std::string Quoted(absl::string_view value) {
  return LogLine("x").Add("k", value).text().substr(std::string("event=x k=").size());
}

TEST(LogLineTest, PlainValuesStandAsTheyAre) {
  EXPECT_EQ(LogLine("load").Add("model", "planner").Add("version", 8U).Add("ok", true).text(),
            "event=load model=planner version=8 ok=true");
}

TEST(LogLineTest, QuotesWhatWouldBreakAParser) {
  EXPECT_EQ(Quoted(""), R"("")");
  EXPECT_EQ(Quoted("two words"), R"("two words")");
  EXPECT_EQ(Quoted("a=b"), R"("a=b")");
  EXPECT_EQ(Quoted(R"(say "hi" \ there)"), R"("say \"hi\" \\ there")");
}

TEST(LogLineTest, AValueNeverStartsALineOrMovesTheCursor) {
  EXPECT_EQ(Quoted("a\nevent=forged\r\t"), R"("a\nevent=forged\r\t")");
  EXPECT_EQ(Quoted("\x1b[2J\x7f"), R"("\x1b[2J\x7f")");
  EXPECT_EQ(Quoted("\xC2\x9B"), R"("\xc2\x9b")");  // CSI as one C1 character.
  EXPECT_EQ(Quoted(absl::string_view("a\0b", 3)), R"("a\x00b")");
}

TEST(LogLineTest, KeepsUtf8AndShowsOtherBytes) {
  EXPECT_EQ(Quoted("größe"), "\"größe\"");
  EXPECT_EQ(Quoted("\xff\xc3"), R"("\xff\xc3")");
  EXPECT_EQ(Quoted("\xed\xa0\x80"), R"("\xed\xa0\x80")");  // A surrogate.
  EXPECT_EQ(Quoted("\xc0\xaf"), R"("\xc0\xaf")");          // Overlong.
}

TEST(LogLineTest, CutsLongValuesAtACharacter) {
  const std::string cut = Quoted(std::string(LogLine::kMaxValueBytes - 1, 'a') + "ö" + "tail");
  EXPECT_THAT(cut, HasSubstr("..."));
  EXPECT_THAT(cut, Not(HasSubstr("\\x")));
  EXPECT_LT(cut.size(), LogLine::kMaxValueBytes + 8);
}

TEST(LogLineTest, ErrorsHaveCodeAndText) {
  EXPECT_EQ(LogLine("x").AddError(absl::OkStatus()).text(), "event=x");
  EXPECT_EQ(LogLine("x").AddError(absl::NotFoundError("no such")).text(),
            R"(event=x code=NOT_FOUND error="no such")");
}

// What `act` makes the logger write, by line.
template <typename Act>
std::vector<std::string> Logged(LogLevel level, Act act) {
  ::testing::internal::CaptureStderr();
  {
    Logger logger(level);
    act(logger);
  }  // Writes everything out.
  const std::string text = ::testing::internal::GetCapturedStderr();
  return absl::StrSplit(text, '\n', absl::SkipEmpty());
}

TEST(LoggerTest, LinesHaveTimeLevelAndEvent) {
  const auto lines = Logged(LogLevel::kInfo, [](Logger& logger) {
    logger.Write(LogLevel::kWarning, LogLine("scan").Add("invalid", 2));
  });
  ASSERT_THAT(lines, SizeIs(1));
  EXPECT_THAT(lines[0],
              MatchesRegex("ts=20[0-9-]+T[0-9:]+\\.[0-9]+Z level=warning event=scan invalid=2"));
}

TEST(LoggerTest, LevelsBelowTheLimitAreLeftOut) {
  const auto lines = Logged(LogLevel::kWarning, [](Logger& logger) {
    EXPECT_FALSE(logger.Enabled(LogLevel::kInfo));
    logger.Write(LogLevel::kInfo, LogLine("quiet"));
    logger.SetLevel(LogLevel::kDebug);
    logger.Write(LogLevel::kDebug, LogLine("loud"));
  });
  ASSERT_THAT(lines, SizeIs(1));
  EXPECT_THAT(lines[0], HasSubstr("event=loud"));
}

TEST(LoggerTest, LevelNames) {
  EXPECT_EQ(*ParseLogLevel("warn"), LogLevel::kWarning);
  EXPECT_EQ(*ParseLogLevel("debug"), LogLevel::kDebug);
  EXPECT_THAT(std::string(ParseLogLevel("chatty").status().message()), HasSubstr("\"chatty\""));
}

OperationSnapshot Swap(OperationState state) {
  OperationSnapshot operation;
  operation.id = 12;
  operation.kind = OperationKind::kSwap;
  operation.state = state;
  operation.model = "planner";
  operation.version = 8;
  operation.label = "stable";
  operation.requested_by_uid = 1000;
  return operation;
}

TEST(LogObserverTest, AnOperationIsOneLineAtTheStartAndOneAtTheEnd) {
  const auto lines = Logged(LogLevel::kInfo, [](Logger& logger) {
    ManualClock clock;
    LogObserver observer(logger, clock);
    OperationSnapshot operation = Swap(OperationState::kRunning);
    observer.OnOperation(operation);
    operation.bytes_done = 10;
    observer.OnOperation(operation);
    operation.state = OperationState::kFailed;
    operation.status = absl::DataLossError("bad chunk 3");
    observer.OnOperation(operation);
  });
  ASSERT_THAT(lines, SizeIs(2));
  EXPECT_THAT(lines[0], HasSubstr("level=info event=operation operation=op-12"));
  EXPECT_THAT(lines[0], HasSubstr("uid=1000"));
  EXPECT_THAT(lines[1], HasSubstr("level=warning"));
  EXPECT_THAT(lines[1], HasSubstr("code=DATA_LOSS error=\"bad chunk 3\""));
}

TEST(LogObserverTest, AVersionIsNewsOnlyWhenItChanges) {
  const auto lines = Logged(LogLevel::kInfo, [](Logger& logger) {
    ManualClock clock;
    LogObserver observer(logger, clock);
    VersionSnapshot version;
    version.key = {"planner", 8};
    version.phase = Phase::kReady;
    observer.OnVersion(version);
    version.leases = 3;
    observer.OnVersion(version);
    version.health = Health::kSuspect;
    version.health_reason = HealthReason::kSourceChanged;
    observer.OnVersion(version);
  });
  ASSERT_THAT(lines, SizeIs(2));
  EXPECT_THAT(lines[0], HasSubstr("event=version model=planner version=8 phase=READY health=OK"));
  EXPECT_THAT(lines[1], HasSubstr("level=warning"));
  EXPECT_THAT(lines[1], HasSubstr("health_reason="));
}

TEST(LogObserverTest, LeasesAndSessionsAreForDebugging) {
  const auto act = [](Logger& logger) {
    ManualClock clock;
    LogObserver observer(logger, clock);
    observer.OnLease(Lease{}, LeaseChange::kGranted);
    observer.OnSession(Session{}, true, "");
  };
  EXPECT_THAT(Logged(LogLevel::kInfo, act), IsEmpty());
  EXPECT_THAT(Logged(LogLevel::kDebug, act), SizeIs(2));
}

TEST(LogObserverTest, RefusalsOfOneKindAreAFewLinesASecondAndACount) {
  const auto lines = Logged(LogLevel::kInfo, [](Logger& logger) {
    ManualClock clock;
    LogObserver observer(logger, clock);
    for (int i = 0; i < 1000; ++i)
      observer.OnRefused(Peer{}, "connect: too many", RefusedFor::kConnections);
    observer.OnRefused(Peer{}, "Load", RefusedFor::kNoRight);  // Another kind has lines of its own.
    clock.Advance(absl::Seconds(1));
    observer.OnRefused(Peer{}, "connect: too many", RefusedFor::kConnections);
  });
  ASSERT_THAT(lines, SizeIs(LogObserver::kRefusalsPerSecond + 2));
  EXPECT_THAT(lines[0], Not(HasSubstr("suppressed")));
  EXPECT_THAT(lines[LogObserver::kRefusalsPerSecond], HasSubstr("what=Load"));
  EXPECT_THAT(lines.back(), HasSubstr("suppressed=995"));
}

TEST(LoggerTest, AStderrThatNobodyReadsDoesNotHoldUpTheEnd) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const int before = ::dup(STDERR_FILENO);
  ::dup2(ends[1], STDERR_FILENO);
  const absl::Time begin = absl::Now();
  {
    Logger logger(LogLevel::kInfo);
    for (int i = 0; i < 2000; ++i) {  // More than a pipe holds.
      logger.Write(LogLevel::kInfo, LogLine("line").Add("text", std::string(100, 'x')));
    }
  }
  const absl::Duration took = absl::Now() - begin;
  ::dup2(before, STDERR_FILENO);
  ::close(before);
  EXPECT_GE(took, Logger::kLastWords);  // It did wait.
  EXPECT_LT(took, 5 * Logger::kLastWords);
  ::close(ends[0]);
  ::close(ends[1]);
}

}  // namespace
}  // namespace modelhost
