// The daemon's end of the socket, with a peer that does as it likes.
#include "daemon/device_agent/agent_link.h"

#include <gmock/gmock.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

namespace modelhost {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr uint64_t kRequestBytes = 1000;

class AgentLinkTest : public ::testing::Test {
 protected:
  using Peer = std::function<void(const UniqueFd& socket, uint32_t request_id)>;

  ~AgentLinkTest() override {
    link_.reset();
    if (peer_.joinable()) peer_.join();
  }
  // `then` runs once a request has come; a send that fails says that this end is closed.
  void Start(Peer then) {
    auto ends = MakeSeqpacketPair();
    ASSERT_TRUE(ends.ok());
    link_ = std::make_unique<AgentLink>(std::move(ends->first));
    peer_ = std::thread([socket = std::move(ends->second), then = std::move(then)] {
      std::array<std::byte, abi::kMaxFrameBytes> buffer;
      const auto heard = ReceiveFrame(socket, buffer, ReceiveWait::kUntilDeadline,
                                      std::chrono::steady_clock::now() + seconds(60));
      if (heard.ok()) then(socket, heard->header.request_id);
    });
  }
  static Result<void> Tell(const UniqueFd& socket, agent::Frame frame, uint32_t id,
                           uint64_t bytes) {
    agent::Reply reply{};
    reply.header = MakeHeader(static_cast<abi::FrameType>(frame), sizeof(reply), id, 0);
    reply.bytes = bytes;
    return SendFrame(socket, AsBytes(reply), {}, {});
  }
  // Until this end is closed.
  static void Await(const UniqueFd& socket) {
    std::array<std::byte, abi::kMaxFrameBytes> buffer;
    while (ReceiveFrame(socket, buffer, ReceiveWait::kUntilDeadline,
                        std::chrono::steady_clock::now() + seconds(60))
               .ok()) {
    }
  }
  Result<AgentAnswer> Ask(const AgentPatience& patience,
                          const AgentLink::Progress& progress = nullptr) {
    agent::Request request{};
    request.bytes = kRequestBytes;
    return link_->Ask(agent::Frame::kUpload, request, {}, patience, progress);
  }

  std::unique_ptr<AgentLink> link_;
  std::thread peer_;
};

TEST_F(AgentLinkTest, ProgressWithoutEndIsNoProgressBeyondWhatThereIsToDo) {
  Start([](const UniqueFd& socket, uint32_t id) {
    for (uint64_t bytes = 1;; bytes += kRequestBytes / 4) {
      auto told = Tell(socket, agent::Frame::kProgress, id, bytes);
      while (!told.ok() && told.error().code == Code::kResourceExhausted) {
        std::this_thread::yield();
        told = Tell(socket, agent::Frame::kProgress, id, bytes);
      }
      if (!told.ok()) return;
    }
  });
  uint64_t most = 0;
  // Ends by itself when the test should fail.
  const auto give_up = std::chrono::steady_clock::now() + seconds(10);
  const auto answer = Ask({milliseconds(200), milliseconds(200)}, [&](uint64_t done) {
    most = done;
    return std::chrono::steady_clock::now() < give_up;
  });
  ASSERT_FALSE(answer.ok());
  EXPECT_EQ(answer.error().code, Code::kDeadlineExceeded) << answer.error().text;
  EXPECT_EQ(most, 2 * kRequestBytes);
  EXPECT_TRUE(link_->broken());
}

TEST_F(AgentLinkTest, WhoDoesNotStopAfterACancelIsNotWaitedForAsLongAsWhoWorks) {
  Start([](const UniqueFd& socket, uint32_t) { Await(socket); });
  int asked = 0;
  const auto start = std::chrono::steady_clock::now();
  const auto answer = Ask({seconds(60), milliseconds(100)}, [&](uint64_t) { return ++asked <= 2; });
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(30));
  ASSERT_FALSE(answer.ok());
  EXPECT_EQ(answer.error().code, Code::kCancelled);
  EXPECT_THAT(answer.error().text, HasSubstr("did not stop for 100 ms"));
  EXPECT_TRUE(link_->broken());
}

TEST_F(AgentLinkTest, AnAnswerThatComesAfterACancelCounts) {
  Start([](const UniqueFd& socket, uint32_t id) {
    std::array<std::byte, abi::kMaxFrameBytes> buffer;
    const auto stop = ReceiveFrame(socket, buffer, ReceiveWait::kUntilDeadline,
                                   std::chrono::steady_clock::now() + seconds(60));
    if (stop.ok()) (void)Tell(socket, agent::Frame::kReply, id, 7);
  });
  int asked = 0;
  const auto answer = Ask({seconds(60), seconds(60)}, [&](uint64_t) { return ++asked <= 2; });
  ASSERT_TRUE(answer.ok()) << answer.error().text;
  EXPECT_EQ(answer->reply.bytes, 7U);
  EXPECT_FALSE(link_->broken());
}

TEST_F(AgentLinkTest, NobodyIsWaitedForOnceAllHasEnded) {
  std::atomic<bool> ended{false};
  Start([&ended](const UniqueFd& socket, uint32_t) {
    ended = true;
    Await(socket);
  });
  const auto start = std::chrono::steady_clock::now();
  const auto answer = Ask({seconds(60), seconds(60), &ended});
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(30));
  ASSERT_FALSE(answer.ok());
  EXPECT_EQ(answer.error().code, Code::kCancelled);
  EXPECT_TRUE(link_->broken());
}

}  // namespace
}  // namespace modelhost
